"""Rounding float32 to bfloat16 by chance, with chances that nobody has to remember.

Nearest rounding of a running mean loses every change below half a unit of the last of bfloat16's 8 digits: a second
moment with beta2 = 0.999 would never fall. Stochastic rounding (Gupta et al., arXiv 1502.02551; for bfloat16 Zamirai
et al., arXiv 2010.06192) goes up with the probability of the distance, and so is right on average.

The random bits are a hash of seed, parameter, step and element: replicas round alike, a run that goes on from a
checkpoint rounds as it would have, and no generator is kept.
"""

import hashlib

import torch

_MASK = 0xFFFFFFFF
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)  # congruent modulo 2^32, and its product with 32 bits fits into 63


def rounding_key(*parts: object) -> int:
    """31 bits that stand for ``parts``, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, ("rounding", *parts))).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def random_bits(key: torch.Tensor, first: int, like: torch.Tensor) -> torch.Tensor:
    """32 random bits for each element of the flat tensor ``like``, of which ``first`` precede it. int64.

    The hash is the 32-bit finalizer "lowbias32" of C. Wellons' hash prospector, in int64 with products that cannot
    overflow: CPU and CUDA, eager and compiled agree.

    Args:
        key: int64 scalar, from :func:`rounding_key`.
    """
    return _mix(_mix(torch.arange(like.numel(), device=like.device) + first & _MASK) ^ key)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * _FIRST) & _MASK
    x = x ^ (x >> 15)
    x = (x * _SECOND) & _MASK
    return x ^ (x >> 16)


def stochastic_bfloat16(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """``x`` (float32) rounded up or down to bfloat16, by the low 16 of ``bits``.

    What bfloat16 holds stays as it is, so do infinities; a NaN stays one.
    """
    moved = x.view(torch.int32) + (bits & 0xFFFF).to(torch.int32) & ~0xFFFF
    return torch.where(x.isfinite(), moved.view(torch.float32), x).to(torch.bfloat16)
