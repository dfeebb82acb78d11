"""Model shapes as data. A flavor is a published shape; a TOML's ``[model]`` keys override single fields of it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from config.errors import ConfigError
from config.keys import did_you_mean, shown
from config.moe_flavors import MOE
from config.schema import Model, Moe
from config.shapes import ModelShape as ModelShape
from config.shapes import MoEShape
from config.shapes import RopeScaling as RopeScaling

_LLAMA31 = RopeScaling(factor=8.0)
_LLAMA32 = RopeScaling(factor=32.0)


def _qwen3(dim: int, n_layers: int, n_heads: int, hidden_dim: int, *, tied: bool) -> ModelShape:
    """What the dense models of arXiv 2505.09388 have in common: heads of 128 whatever the width, QK-norm."""
    return ModelShape(
        vocab_size=151_936,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        hidden_dim=hidden_dim,
        max_seq_len=40_960,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qk_norm=True,
        enable_weight_tying=tied,
    )


FLAVORS: dict[str, dict[str, ModelShape]] = {
    "moe": MOE,
    "qwen3": {
        "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
        "1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
        "4B": _qwen3(2560, 36, 32, 9728, tied=True),
        "8B": _qwen3(4096, 36, 32, 12_288, tied=False),
        "14B": _qwen3(5120, 40, 40, 17_408, tied=False),
        "32B": _qwen3(5120, 64, 64, 25_600, tied=False),
    },
    "llama3": {
        "debug": ModelShape(
            vocab_size=4096, dim=128, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=384, max_seq_len=2048
        ),
        "debugmodel": ModelShape(  # torchtitan 0.2.2's
            vocab_size=2048,
            dim=256,
            n_layers=6,
            n_heads=16,
            n_kv_heads=16,
            hidden_dim=768,
            max_seq_len=131_072,
            rope_scaling=_LLAMA31,
        ),
        "160M": ModelShape(
            vocab_size=50_304, dim=768, n_layers=12, n_heads=12, n_kv_heads=12, hidden_dim=2048, max_seq_len=4096
        ),
        "1B": ModelShape(
            vocab_size=128_256,
            dim=2048,
            n_layers=16,
            n_heads=32,
            n_kv_heads=8,
            hidden_dim=8192,
            max_seq_len=131_072,
            rope_scaling=_LLAMA32,
            enable_weight_tying=True,
        ),
        "1B_untied": ModelShape(
            vocab_size=128_256,
            dim=2048,
            n_layers=16,
            n_heads=32,
            n_kv_heads=8,
            hidden_dim=8192,
            max_seq_len=131_072,
            rope_scaling=_LLAMA32,
        ),
        "8B": ModelShape(
            vocab_size=128_256,
            dim=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            hidden_dim=14_336,
            max_seq_len=131_072,
            rope_scaling=_LLAMA31,
        ),
        "70B": ModelShape(
            vocab_size=128_256,
            dim=8192,
            n_layers=80,
            n_heads=64,
            n_kv_heads=8,
            hidden_dim=28_672,
            max_seq_len=131_072,
            rope_scaling=_LLAMA31,
        ),
        "405B": ModelShape(
            vocab_size=128_256,
            dim=16_384,
            n_layers=126,
            n_heads=128,
            n_kv_heads=8,
            hidden_dim=53_248,
            max_seq_len=131_072,
            rope_scaling=_LLAMA31,
        ),
    },
}


def resolve_shape(model: Model, moe: Moe | None = None) -> ModelShape:
    """The shape of ``[model]`` and ``[moe]``: the flavor with the overrides that are set.

    Raises:
        ConfigError: unknown family or flavor. (config/rules.py checks divisibility.)
    """
    if model.name not in FLAVORS:
        guess, choices = did_you_mean(model.name, FLAVORS), ", ".join(shown(name) for name in FLAVORS)
        raise ConfigError(f"model.name = {shown(model.name)}: unknown model family{guess}; known: {choices}")
    family = FLAVORS[model.name]
    if model.flavor not in family:
        others = [name for name, flavors in FLAVORS.items() if model.flavor in flavors]
        if others:
            raise ConfigError(
                f"model.flavor = {shown(model.flavor)} belongs to model.name = {shown(others[0])}; set both"
            )
        guess, choices = did_you_mean(model.flavor, family), ", ".join(shown(name) for name in family)
        raise ConfigError(f"model.flavor = {shown(model.flavor)}: no flavor of {model.name}{guess}; known: {choices}")
    shape = family[model.flavor]
    changed = _overrides(model, ModelShape)
    if (
        changed.keys() & {"dim", "n_heads"}
        and "head_dim" not in changed
        and shape.head_dim * shape.n_heads == shape.dim
    ):
        changed["head_dim"] = 0  # follow dim / n_heads as the flavor does
    if moe is not None and shape.moe is not None:
        changed["moe"] = replace(shape.moe, **_overrides(moe, MoEShape))
    return replace(shape, **changed)


def _overrides(section: Model | Moe, shape: type) -> dict[str, Any]:
    """The fields of ``shape`` that the section sets."""
    names = {f.name for f in fields(shape)} & set(vars(section))
    return {name: getattr(section, name) for name in names if getattr(section, name) is not None}
