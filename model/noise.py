"""Random numbers without a generator: each is a hash of what it belongs to.

Routing noise is a function of (noise seed, step, layer, token, column), so it is the same on every mesh, in every
split into micro-batches and when activation checkpointing computes a block a second time. A stateful generator is none
of these.

The hash is the two-round 32-bit finalizer "lowbias32" of C. Wellons' hash prospector. It is computed in int64 with
products that cannot overflow, so eager, compiled, CPU and CUDA agree bit for bit.
"""

import hashlib
import math

import torch

_MASK = 0xFFFFFFFF
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)  # congruent modulo 2^32, and its product with 32 bits fits into 63
_GOLDEN = 0x1E3779B9
_BITS = 23  # (n + 1/2) / 2^23 is exact in float32 and never 0 or 1


def noise_key(noise_seed: int, name: str) -> tuple[int, int]:
    """Two 32-bit words that stand for the seed and the name of a layer, the same in every process."""
    digest = hashlib.sha256(f"noise/{noise_seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble 32-bit words held in an int64 tensor; a bijection on them."""
    x = x ^ (x >> 16)
    x = (x * _FIRST) & _MASK
    x = x ^ (x >> 15)
    x = (x * _SECOND) & _MASK
    return x ^ (x >> 16)


def uniform(key: torch.Tensor, purpose: int, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Independent uniforms on (0, 1), never 0 or 1.

    Args:
        key: int64 (2,), from :func:`noise_key`; a tensor, so that layers share one compiled graph.
        purpose: separates uses of the same key (jitter, Gumbel, ...).
        rows: int64 (T,), non-negative: a number for each row, its token.
        columns: how many numbers a row.

    Returns:
        float32 (T, columns).
    """
    low = mix((rows & _MASK) ^ key[0])
    high = mix(((rows >> 32) & _MASK) ^ key[1] ^ low)
    column = mix(torch.arange(columns, device=rows.device) * _GOLDEN + purpose & _MASK)
    word = mix(mix(low[:, None] ^ column) ^ high[:, None])
    return ((word >> (32 - _BITS)).float() + 0.5) * 2.0**-_BITS


def gumbel(key: torch.Tensor, purpose: int, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Standard Gumbel variables, -log(-log u): adding them to logits and taking the maximum samples their softmax."""
    return -torch.log(-torch.log(uniform(key, purpose, rows, columns)))


def normal(key: torch.Tensor, purpose: int, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Standard normal variables by the Box-Muller transform."""
    radius = torch.sqrt(-2.0 * torch.log(uniform(key, purpose, rows, columns)))
    return radius * torch.cos(2.0 * math.pi * uniform(key, purpose + (1 << 16), rows, columns))
