"""All-gather attention: every rank gathers the keys and values of whole sequences, and attends with its own queries.

One exchange instead of a ring (Llama 3, arXiv 2407.21783, section 3.3.2), nothing of which overlaps; each rank holds
whole keys and values, and their whole gradients in float32, while it computes. They are not kept for the backward pass,
which gathers again.

Bytes a rank receives, for its own keys and values of kv bytes each: (n - 1) x 2 kv forward; backward the same again,
and (n - 1) x 2 kv of gradients in float32.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from parallelisms.block_attention import KERNELS, Merged, add_gradients, group_named, operator, rows
from parallelisms.context_layout import Block, Layout

_OPERATORS = torch.ops._c10d_functional  # torch 2.13 deprecates both Python names of these for names that 2.11 lacks


def _gathered(k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Keys and values of all ranks: (n, 2, B, S / n, H_kv, D)."""
    together = _OPERATORS.all_gather_into_tensor(torch.stack([k, v]), group.size(), group.group_name)
    return _OPERATORS.wait_tensor(together).unflatten(0, (group.size(), 2))


def _ordered(held: torch.Tensor, cut: Layout) -> torch.Tensor:
    """(n, 2, B, S / n, ...) by rank -> (2, B, S, ...) in the order of the sequence."""
    pieces = held.unflatten(3, (cut.pieces // cut.degree, -1))  # (n, 2, B, pieces of a rank, piece, ...)
    by_place = {p: pieces[rank, :, :, i] for rank in range(cut.degree) for i, p in enumerate(cut.held(rank))}
    return torch.cat([by_place[p] for p in range(cut.pieces)], dim=2)


def _by_rank(ordered: torch.Tensor, cut: Layout) -> torch.Tensor:
    """The inverse of :func:`_ordered`."""
    pieces = ordered.unflatten(2, (cut.pieces, -1))  # (2, B, pieces, piece, ...)
    return torch.stack([pieces[:, :, cut.held(rank)].flatten(2, 3) for rank in range(cut.degree)])


def _blocks(cut: Layout, rank: int, length: int, causal: bool) -> Iterator[Block]:
    """What queries of ``rank`` compute with the keys of the whole sequence, ``length`` queries a rank.

    A rank's own piece comes first, so that each query has seen itself when others are merged.
    """
    if not causal:
        yield Block(slice(0, length), slice(0, length * cut.degree), False)
        return
    piece = length * cut.degree // cut.pieces
    own = [(slice(i * piece, (i + 1) * piece), p * piece) for i, p in enumerate(cut.held(rank))]
    for queries, start in own:
        yield Block(queries, slice(start, start + piece), True)
        if start:
            yield Block(queries, slice(0, start), False)


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
    cut = Layout(layout, ranks.size())
    keys, values = _ordered(_gathered(k, v, ranks), cut)
    merged = Merged(q)
    for block in _blocks(cut, ranks.rank(), q.shape[1], causal):
        mask = cut.mask(documents, ranks.rank(), None, block)
        found = compute.forward(rows(q, block.q), rows(keys, block.k), rows(values, block.k), block.causal, mask)
        merged.add(*found, block.q)
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
    cut = Layout(layout, ranks.size())
    held = _ordered(_gathered(k, v, ranks), cut)
    dq, total = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(held, dtype=lse.dtype)
    for block in _blocks(cut, ranks.rank(), q.shape[1], causal):
        mask = cut.mask(documents, ranks.rank(), None, block)
        parts = add_gradients(compute, dout, q, held, out, lse, block, mask, dq)
        for whole, part in zip(total, parts, strict=True):
            whole[:, block.k] += part
    by_rank = _by_rank(total, cut).flatten(0, 1)
    dk, dv = _OPERATORS.wait_tensor(_OPERATORS.reduce_scatter_tensor(by_rank, "sum", ranks.size(), group))
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)


allgather_attention = operator("allgather_attention", _forward, _backward)
"""(q, k, v, documents, causal, layout, kernel, group) -> (out, lse): as :data:`parallelisms.ring_attention`."""
