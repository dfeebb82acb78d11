"""The value every parameter starts from, as a function of its name and of nothing about the mesh.

Scales follow torchtitan's Llama 3: truncated normals of std 0.02; the two projections into the residual stream (wo,
w2) and w3 are narrowed with depth, 0.02 / sqrt(2 (layer + 1)); the head starts at dim ** -0.5. A tied embedding
serves as head and takes the head's scale.
"""

import hashlib
import math
import re
from dataclasses import dataclass, replace

import torch

from config.flavors import ModelShape


@dataclass(frozen=True)
class InitialValue:
    """``constant``, or a normal of ``std`` truncated at ``cutoff`` standard deviations when constant is None."""

    constant: float | None = None
    std: float = 0.0
    cutoff: float = math.inf
    stacked: bool = False
    """Each slice of the first dimension is an expert with its own seed: whoever holds expert 3 gets the same one."""
    row_spread: float = 0.0
    """Each row is scaled by exp(row_spread x a standard normal): a router whose experts start unequal."""
    odd_std: float | None = None
    """Every second column, from the second on, has this std and its own draw (the up projections of w13)."""


def initial_value(name: str, shape: ModelShape) -> InitialValue:
    """The rule for the parameter ``name`` (global layer index, no wrapper prefixes).

    Raises:
        KeyError: no rule speaks of the name. A new kind of parameter must be given one.
    """
    if name == "output.weight" or (name == "tok_embeddings.weight" and shape.enable_weight_tying):
        return InitialValue(std=shape.dim**-0.5, cutoff=3.0)
    if name == "tok_embeddings.weight":
        return InitialValue(std=1.0)
    if name == "norm.weight" or name.endswith("_norm.weight"):
        return InitialValue(constant=1.0)
    match = re.fullmatch(
        r"layers\.(\d+)\.(?:(attention\.w[qkvo]|feed_forward\.w[123]|moe\.shared_experts\.w[123]|moe\.router\.gate)\.weight"
        r"|(moe\.experts\.w13|moe\.experts\.w2))",
        name,
    )
    if match is None:
        raise KeyError(f"no initial value is defined for parameter {name!r}")
    layer, kind = int(match[1]), match[2] or match[3]
    narrow, cutoff = 0.02 / math.sqrt(2 * (layer + 1)), 2 / 0.02
    if kind == "moe.experts.w13":
        return InitialValue(std=0.02, cutoff=cutoff, stacked=True, odd_std=narrow)
    if kind == "moe.router.gate" and shape.moe is not None:
        return InitialValue(std=0.02, cutoff=cutoff, row_spread=shape.moe.initial_skew)
    narrowed = kind.endswith((".wo", ".w2", ".w3"))
    return InitialValue(std=narrow if narrowed else 0.02, cutoff=cutoff, stacked=match[3] is not None)


def seed_of(init_seed: int, name: str) -> int:
    """A 63-bit seed from ``init_seed`` and a parameter's name, the same in every process and Python version."""
    digest = hashlib.sha256(f"{init_seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def draw(name: str, size: torch.Size, rule: InitialValue, init_seed: int, device: torch.device) -> torch.Tensor:
    """The whole initial tensor, float32 of ``size`` on ``device``: a function of the arguments alone.

    Bit-identical for one device type and GPU model; CPU and CUDA generators differ.
    """
    full = torch.empty(size, dtype=torch.float32, device=device)
    if rule.constant is not None:
        return full.fill_(rule.constant)
    if rule.stacked:
        each = replace(rule, stacked=False)
        for expert, part in enumerate(full):
            part.copy_(draw(f"{name}.{expert}", part.shape, each, init_seed, device))
        return full
    if rule.row_spread:
        lengths = draw(f"{name}.skew", torch.Size([size[0], 1]), InitialValue(std=rule.row_spread), init_seed, device)
        return draw(name, size, replace(rule, row_spread=0.0), init_seed, device) * lengths.exp()
    if rule.odd_std is not None:
        half = torch.Size([*size[:-1], size[-1] // 2])
        full[..., 0::2] = draw(f"{name}.gate", half, replace(rule, odd_std=None), init_seed, device)
        full[..., 1::2] = draw(f"{name}.up", half, replace(rule, std=rule.odd_std, odd_std=None), init_seed, device)
        return full
    generator = torch.Generator(device=device).manual_seed(seed_of(init_seed, name))
    if math.isinf(rule.cutoff):
        return full.normal_(0.0, rule.std, generator=generator)
    bound = rule.cutoff * rule.std
    return torch.nn.init.trunc_normal_(full, 0.0, rule.std, -bound, bound, generator=generator)
