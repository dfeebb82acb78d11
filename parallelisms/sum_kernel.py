"""The Triton kernel of parallelisms/sum_of_ranks.py. Imported where it is launched: a CPU needs no Triton."""

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Elements a program sums."""


@triton.jit
def _sum(
    own,
    received,
    target,
    n,
    between,
    RANK: tl.constexpr,  # noqa: N803
    WORLD: tl.constexpr,  # noqa: N803
    ADD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at * 0 + between  # 64 bits: a later row may begin beyond 2^31
    inside = at < n
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            part = tl.load(own + at, mask=inside, other=0.0)
        elif rank < RANK:
            part = tl.load(received + rank * row + at, mask=inside, other=0.0)
        else:
            part = tl.load(received + (rank - 1) * row + at, mask=inside, other=0.0)
        total += part.to(tl.float32)
    if ADD:
        total = tl.load(target + at, mask=inside, other=0.0) + total
    tl.store(target + at, total, mask=inside)


def launch_sum(own: torch.Tensor, received: torch.Tensor, rank: int, target: torch.Tensor, *, add: bool) -> None:
    """As :func:`parallelisms.sum_of_ranks.sum_of_ranks`, on a GPU, with a float32 target."""
    n = own.numel()
    rows = received if len(received) else own[None]  # never read where there is one rank
    _sum[(triton.cdiv(n, BLOCK),)](
        own, rows, target, n, rows.stride(0), RANK=rank, WORLD=len(received) + 1, ADD=add, BLOCK=BLOCK
    )
