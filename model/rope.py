"""Rotary position embedding (Su et al., arXiv 2104.09864) with the frequency scaling of Llama 3.1.

The half-split layout of Hugging Face checkpoints: feature i is rotated together with feature i + head_dim / 2, so
weights go in and out without a permutation.
"""

import math

import torch

from config.flavors import RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Angular frequency of each feature pair, in radians a token: float32 ``(head_dim / 2,)``.

    With ``scaling``, wavelengths longer than original_max_seq_len / low_freq_factor are stretched by ``factor``, those
    shorter than original_max_seq_len / high_freq_factor are kept, and those between are interpolated (Llama 3.1
    release).
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # full rotations over the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)


def rope_table(length: int, frequencies: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of every position: float32 ``(length, 2, head_dim / 2)``."""
    angles = torch.arange(length, dtype=torch.float32, device=frequencies.device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def apply_rope(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` (B, S, H, D) by the rows of ``table``, (S, 2, D/2) or (B, S, 2, D/2), in at least float32; dtype
    is kept.
    """
    cos, sin = table.unsqueeze(-3).unbind(-2)  # (..., S, 1, D/2)
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def rotate(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`apply_rope` of queries (B, S, H, D) and keys (B, S, H_kv, D)."""
    return apply_rope(q, table), apply_rope(k, table)
