"""Tokens to experts on other ranks, once for each expert: the dispatcher of GShard (arXiv 2006.16668), without padding.

It stands where model/moe.py has its local dispatcher. The result is that of all experts on one rank: a token's weight
travels along and is applied where the expert is, so the router's gradient comes back the same way.

The experts of a rank may be computed in parts. While those of one part compute, tokens of the next travel in and
results of the one before travel back, and gradients likewise. Parts are of experts, not of tokens: each expert has the
rows that it has without parts, in their order, in one product, so nothing is rounded otherwise.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallelisms.mesh import on_this_rank
from parallelisms.token_exchange import Back, Counts, Order, Out, Route, ToExperts, collect, sort_rows, spread

DISPATCH, COMBINE = "moe.dispatch", "moe.combine"
"""Ranges of a profile: the way out and the way back, in forward and in backward."""


class Visit(NamedTuple):
    """What the experts of a rank need to know of one exchange."""

    out: Out
    back: Back
    labels: ToExperts
    """Ids, if they are sent."""
    counts: Counts
    rows: list[int]
    """That arrive for each part."""


class AllToAll:
    """Exchange of one layer's tokens.

    Rows are sent sorted by part, and in it by expert, and numbers of rows are told an expert at a time, so what arrives
    is one sorted piece a rank and part: no ids travel, and the receiver finds the experts' order by additions.

    Args:
        group: ranks that hold different experts; rank r holds the r-th share, by id.
        num_experts: of all ranks.
        overlap: compute what is beside the experts while tokens are on their way to them, else afterwards.
        parts: in which the experts of a rank are computed, neighbours together; at most one for each.
    """

    gathers_early = True
    """Rows are gathered before their number is known on the host, where nearly as many go somewhere as may."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, overlap: bool, parts: int = 1):
        self.group, self.overlap = group, overlap
        self.num_experts, self.local = num_experts, num_experts // group.size()
        each, over = divmod(self.local, parts)
        self.sizes = tuple(each + (part < over) for part in range(parts))
        """Experts of each part."""
        self.spans = [(end - size, end) for size, end in zip(self.sizes, itertools.accumulate(self.sizes), strict=True)]
        self.rows_sent, self.rows_received = 0, 0
        """To and from other ranks, in the latest forward pass with gradients. Recomputation finds the same."""

    def arrange(self, experts: torch.Tensor, bound: int) -> tuple[Order, torch.Tensor]:
        """A row for each choice.

        Args:
            experts: int64 (T, slots), global ids; num_experts means nowhere.
            bound: at most so many go somewhere.

        Returns:
            Order of ``bound`` rows; int64 (n, m), what each rank is told: the rows it gets, as m numbers.
        """
        if len(self.sizes) == 1:
            order, rows = sort_rows(experts, self.num_experts, bound)
        else:
            turn = turns(self.group.size(), self.sizes, experts.device)
            order, rows = sort_rows(turn[experts], self.num_experts, bound)
            rows = rows[turn[:-1]]
        return order, rows.view(-1, self.local)

    def label(
        self, order: Order, experts: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What travels with the rows of ``order``: weights float32 (R, 1), and local ids int32, or None if the receiver
        knows them.
        """
        return weights.flatten().gather(0, order.slot)[:, None], None

    def routes(self, sent: list[list[int]], received: list[list[int]]) -> list[Route]:
        """Of the parts, from what the ranks were told."""
        return [
            Route([sum(rows[a:b]) for rows in sent], [sum(rows[a:b]) for rows in received], self.group)
            for a, b in self.spans
        ]

    @torch.compiler.disable  # numbers of rows are read on the host
    def __call__(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        max_rows: int | None,
        run: Callable[..., tuple[torch.Tensor, ...]],
        beside: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :class:`model.moe.Dispatcher` says; a collective over ``group``."""
        with torch.profiler.record_function(DISPATCH):
            bound = experts.numel() if max_rows is None else min(max_rows, experts.numel())
            order, told = self.arrange(experts, bound)
            counts = Counts(told, self.group)
            rows = spread(x, order) if self.gathers_early else None
            routes = self.routes(*counts.read())
            total = sum(sum(route.sent) for route in routes)
            order = order.first(total)
            if rows is None:
                rows = spread(x, order)
            elif len(rows) > total:
                rows = rows[:total]
            weights, ids = self.label(order, experts, weights)
        if torch.is_grad_enabled():
            own = sum(route.sent[self.group.rank()] for route in routes)
            self.rows_sent, self.rows_received = total - own, sum(sum(route.received) for route in routes) - own
        out, back, labels = Out(routes, DISPATCH), Back(routes, COMBINE), ToExperts(routes, DISPATCH)
        handle = out.start(rows, weights)
        labels.send(*(() if ids is None else (ids,)))
        del rows, weights, ids  # they are held while they travel
        visit = Visit(out, back, labels, counts, [sum(route.received) for route in routes])
        other = beside() if beside is not None and self.overlap else None
        (rows,) = back.finish(*run(handle, serve=functools.partial(self.serve, visit)))
        with torch.profiler.record_function(COMBINE):
            sums = collect(rows, order)
        return sums, beside() if beside is not None and not self.overlap else other

    def serve(
        self,
        visit: Visit,
        handle: torch.Tensor,
        compute: Callable[..., torch.Tensor],
        plan: Callable[..., list[Any]],
        w13: torch.Tensor,
        w2: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The local experts on what arrives, a part at a time (:meth:`model.experts.Experts.forward`).

        Returns:
            A handle for the results of each part, which are on their way back.
        """
        handles, assignments = [], self.assignments(visit, plan)
        for part, matrices in enumerate(zip(self.cut(w13), self.cut(w2), strict=True)):
            rows, weights = visit.out.finish(part, handle)
            (experts, most), idle = assignments[part], len(rows) == 0
            if idle:  # kernels are given a row at least: one that goes nowhere
                rows, weights = F.pad(rows, (0, 0, 0, 1)), F.pad(weights, (0, 0, 0, 1))
                experts, most = torch.full(weights.shape, self.sizes[part], device=rows.device), 1
            result = compute(rows.to(w13.dtype), experts, weights, *matrices, most)
            del rows  # the experts may keep them in an order of their own
            handles.append(visit.back.start(part, result[:0] if idle else result))
        return tuple(handles)

    def assignments(self, visit: Visit, plan: Callable[..., list[Any]]) -> list[tuple[Any, int]]:
        """For each part local ids int64 (T, slots) or their plan, and how many go somewhere.

        Args:
            plan: :func:`model.permute.plan_pieces`. What it needs is known before the rows are here.
        """
        return list(zip(plan(visit.counts.received, self.sizes, visit.rows), visit.rows, strict=True))

    def cut(self, matrices: torch.Tensor) -> Sequence[torch.Tensor]:
        """Those of each part, (E, ...) -> (experts of the part, ...). Their gradients are put together by one copy."""
        matrices = on_this_rank(matrices)
        return (matrices,) if len(self.sizes) == 1 else matrices.split(self.sizes)


@functools.cache
def turns(ranks: int, sizes: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """When the rows of each expert are sent: by part, by rank in it and by expert.

    Args:
        sizes: experts of each part, on every rank.

    Returns:
        int64 (E + 1,): global id -> place; the id "nowhere" stays the last.
    """
    local = torch.arange(ranks * sum(sizes)).view(ranks, -1)
    order = torch.cat([part.flatten() for part in local.split(sizes, dim=1)])
    return torch.cat([order.argsort(), torch.tensor([len(order)])]).to(device)
