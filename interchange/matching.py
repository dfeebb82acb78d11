"""A shape in terms of [model] and [moe], and where two shapes are not of one model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import tomli_w
import torch

from config.errors import ConfigError
from config.flavors import FLAVORS
from config.keys import shown
from config.schema import Model, Moe
from config.shapes import ModelShape, MoEShape
from interchange.pieces import parameter_sizes

_FREE = ("model.max_seq_len", "moe.initial_skew")
"""Fields that change no weight and no result."""


def differences(one: ModelShape, other: ModelShape) -> Iterator[tuple[str, Any, Any]]:
    """(key, value of one, value of the other) wherever weights of one do not give the same model in the other."""
    a, b = _flat(one), _flat(other)
    for key in {**a, **b}:
        if a.get(key) != b.get(key) and key not in _FREE:
            yield key, a.get(key), b.get(key)


def _flat(shape: ModelShape) -> dict[str, Any]:
    """Key -> value of all that matters in ``shape``."""
    found = {f"model.{f.name}": getattr(shape, f.name) for f in fields(ModelShape) if f.name != "moe"}
    if not shape.qk_norm:
        del found["model.qk_norm_scope"]
    if shape.moe is not None:
        found |= {f"moe.{f.name}": getattr(shape.moe, f.name) for f in fields(MoEShape)}
        if all(shape.moe.has_experts(i) for i in range(shape.n_layers)):
            del found["model.hidden_dim"]  # no layer is dense
    return found


def check_same(folder: str, theirs: ModelShape, ours: ModelShape) -> None:
    """That weights of ``theirs`` fit ``ours`` and mean the same there.

    Raises:
        ConfigError: every key that differs, a line each.
    """
    found = [
        f"checkpoint.initial_load_path = {shown(folder)}: {key} is {shown(a)} there, {shown(b)} in this configuration"
        for key, a, b in differences(theirs, ours)
    ]
    if found:
        way_out = f"`python -m interchange import {folder} OUT` writes the [model] section that fits."
        raise ConfigError("\n".join([*found, way_out]))


def check_sizes(folder: str, theirs: dict[str, torch.Size], shape: ModelShape) -> None:
    """That the parameters of ``shape`` are those of a checkpoint. Its buffers may be there or not.

    Args:
        theirs: name -> size of what the checkpoint holds; a tied head may be among it.

    Raises:
        ConfigError: one is missing, of another size or without a place; the first of them.
    """
    ours = parameter_sizes(shape)
    kinds = {name.rpartition(".")[2] for name in ours}  # "weight", "w13": no buffer is called so
    held = {name: size for name, size in theirs.items() if name.rpartition(".")[2] in kinds}
    if shape.enable_weight_tying:
        held.pop("output.weight", None)
    wrong = [name for name in {**ours, **held} if ours.get(name) != held.get(name)]
    if wrong:
        there, here = (str(tuple(sizes[wrong[0]])) if wrong[0] in sizes else "missing" for sizes in (held, ours))
        raise ConfigError(
            f"checkpoint.initial_load_path = {shown(folder)}: {wrong[0]} is {there} there, {here} in this configuration"
            f" ({len(wrong)} weights differ). Set [model] and [moe] as in the run that wrote it."
        )


def model_toml(shape: ModelShape, assets: str = "") -> str:
    """[model], and [moe] for a shape with experts: the nearest flavor and what differs from it.

    Args:
        assets: folder of the tokenizer that goes with the model.

    Raises:
        ConfigError: no flavor has a value that has no key, such as the rotary scaling.
    """
    keys = {f"model.{f.name}" for f in fields(Model)} | {f"moe.{f.name}" for f in fields(Moe)}
    natural = "moe" if shape.moe is not None else "qwen3" if shape.qk_norm else "llama3"
    best: tuple[str, str, dict[str, Any]] | None = None
    beyond: list[set[str]] = []  # of each flavor, the keys in the way
    for name in sorted(FLAVORS, key=lambda name: name != natural):
        for flavor, known in FLAVORS[name].items():
            if (known.moe is None) != (shape.moe is None):
                continue
            changed = {key: value for key, value, _ in differences(shape, known)}
            if shape.max_seq_len != known.max_seq_len:
                changed["model.max_seq_len"] = shape.max_seq_len
            if changed.keys() - keys:
                beyond.append(set(changed) - keys)
            elif best is None or (name == best[0] and len(changed) < len(best[2])):
                best = (name, flavor, changed)
    if best is None:
        fewest = min((len(keys), sorted(keys)) for keys in beyond)[1]
        lacking = ", ".join(f"{key} = {_flat(shape).get(key)}" for key in fewest)
        raise ConfigError(f"No flavor in config/flavors.py has {lacking}, which no key can set. Add one.")
    name, flavor, changed = best
    if "model.head_dim" not in changed and changed.keys() & {"model.dim", "model.n_heads"}:
        changed["model.head_dim"] = shape.head_dim  # else it would follow dim / n_heads
    tables: dict[str, dict[str, Any]] = {"model": {"name": name, "flavor": flavor}}
    if assets:
        tables["model"]["hf_assets_path"] = assets
    for key, value in changed.items():
        section, field = key.split(".")
        tables.setdefault(section, {})[field] = value
    return tomli_w.dumps(tables)
