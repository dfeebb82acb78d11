"""Ring attention (Liu et al., arXiv 2310.01889): keys and values go round, each rank attends to them as they pass.

While a rank computes with one block, the next is on its way; what queries saw is merged by log-sum-exp. The backward
pass sends keys and values round once more and their gradients after them: an accumulator visits every rank that used
its keys, one step behind them, and ends where the keys live. A rank never holds more than a few blocks, so memory of
attention falls with the number of ranks.

Bytes a rank sends, for keys and values of kv bytes each: (n - 1) x 2 kv forward; backward the same again, and n x 2 kv
of gradients in float32.
"""

import torch
import torch.distributed as dist

from parallelisms.block_attention import KERNELS, Merged, add_gradients, group_named, operator, rows
from parallelisms.context_layout import Layout

_KEYS, _GRADIENTS = 0, 1  # tags, where the backend has them


class _Passing:
    """A tensor on its way to the next rank, while the like of it comes from the one before."""

    def __init__(self, mine: torch.Tensor, group: dist.ProcessGroup, tag: int):
        rank, n = group.rank(), group.size()
        self.mine, self.received = mine, torch.empty_like(mine)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self.mine, group=group, tag=tag, group_peer=(rank + 1) % n),
                dist.P2POp(dist.irecv, self.received, group=group, tag=tag, group_peer=(rank - 1) % n),
            ]
        )

    def wait(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: torch.Tensor | None,
    causal: bool,
    layout: str,
    kernel: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, compute = group_named(group), KERNELS[kernel]
    rank, n = ranks.rank(), ranks.size()
    cut, length = Layout(layout, n), q.shape[1]
    held = torch.stack([k, v])  # one message
    merged = Merged(q)
    for step in range(n):
        passing = _Passing(held, ranks, _KEYS) if step < n - 1 else None
        owner = (rank - step) % n
        block = cut.block(rank, owner, length, causal)
        if block is not None:
            keys, values = (rows(x, block.k) for x in held)
            mask = cut.mask(documents, rank, owner, block)
            merged.add(*compute.forward(rows(q, block.q), keys, values, block.causal, mask), block.q)
        if passing is not None:
            held = passing.wait()
    return merged.result()


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    documents: torch.Tensor | None,
    causal: bool,
    layout: str,
    kernel: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ranks, compute = group_named(group), KERNELS[kernel]
    rank, n = ranks.rank(), ranks.size()
    cut, length = Layout(layout, n), q.shape[1]
    held = torch.stack([k, v])
    dq = torch.zeros_like(q, dtype=lse.dtype)
    gradients: _Passing | None = None
    for step in range(n):
        passing = _Passing(held, ranks, _KEYS) if step < n - 1 else None
        owner = (rank - step) % n
        block = cut.block(rank, owner, length, causal)
        parts: tuple[torch.Tensor, ...] = ()
        if block is not None:
            mask = cut.mask(documents, rank, owner, block)
            parts = add_gradients(compute, dout, q, held, out, lse, block, mask, dq)
        # The sum of these keys' gradients arrives one step after the keys, and leaves with this rank's share.
        total = torch.zeros_like(held, dtype=dq.dtype) if gradients is None else gradients.wait()
        if block is not None:
            for whole, part in zip(total, parts, strict=True):
                whole[:, block.k] += part
        gradients = _Passing(total, ranks, _GRADIENTS)
        if passing is not None:
            held = passing.wait()
    assert gradients is not None
    dk, dv = gradients.wait()
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


ring_attention = operator("ring_attention", _forward, _backward)
"""(q, k, v, documents, causal, layout, kernel, group) -> (out, lse): attention of this rank's queries to all keys.

q (B, S / n, H, D); k, v (B, S / n, H_kv, D): what ``layout`` gives this rank of n. documents: int32 (B, S), whole, or
None. kernel: a key of ``KERNELS``; group: name of the process group. Gradients flow to q, k and v through ``out``.
"""
