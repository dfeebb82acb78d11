"""DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509): heads are exchanged for sequence around the attention.

A rank comes with all heads of its part of the sequence and leaves the exchange with whole sequences of its share of the
heads, so any attention kernel serves as it is. Where there are fewer key and value heads than ranks, each is sent to
every rank that has queries of it.

Elements a rank sends, of n: (n - 1) / n of q, k, v and of the output; backward the same.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives


class _AllToAll(torch.autograd.Function):
    """Exchange x[i] with rank i along the first dimension; its own inverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    return collectives.wait_tensor(collectives.all_to_all_single(x.contiguous(), None, None, group))


def heads_for_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All heads of a part of the sequence -> whole sequences of some heads.

    Args:
        q: (B, S / n, H, D), n dividing H; rank r has the r-th of n contiguous pieces.
        k, v: (B, S / n, H_kv, D), H_kv a multiple or a divisor of n.

    Returns:
        q (B, S, H / n, D), k and v (B, S, max(1, H_kv / n), D).
    """
    n = group.size()
    k, v = (x.repeat_interleave(max(1, n // x.shape[2]), dim=2) for x in (k, v))
    by_rank = [x.unflatten(2, (n, -1)) for x in (q, k, v)]  # (B, S / n, n, heads, D)
    together = torch.cat(by_rank, dim=3).movedim(2, 0)  # one message: (n, B, S / n, heads of all three, D)
    whole = _AllToAll.apply(together, group).movedim(0, 1).flatten(1, 2)  # (B, S, heads of all three, D)
    q, k, v = whole.split([x.shape[3] for x in by_rank], dim=2)
    return q, k, v


def sequence_for_heads(out: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(B, S, H / n, D) -> (B, S / n, H, D): the way back."""
    by_rank = out.unflatten(1, (group.size(), -1)).movedim(1, 0)  # (n, B, S / n, H / n, D)
    return _AllToAll.apply(by_rank, group).movedim(0, 2).flatten(2, 3)
