"""Tokens to experts on other ranks, once for each expert: the dispatcher of GShard (arXiv 2006.16668), without padding.

It stands where model/moe.py has its local dispatcher. The result is that of all experts on one rank: a token's weight
travels along and is applied where the expert is, so the router's gradient comes back the same way.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallelisms.token_exchange import Counts, Journey, Order, Route, collect, sort_rows, spread

DISPATCH, COMBINE = "moe.dispatch", "moe.combine"
"""Ranges of a profile: the way out and the way back, in forward and in backward."""

Run = Callable[..., torch.Tensor]
"""(x, experts, weights, max_rows, counts) -> (T, dim), as :meth:`model.experts.Experts.forward`."""


class AllToAll:
    """Exchange of one layer's tokens.

    Rows are sent sorted by expert and numbers of rows are told an expert at a time, so what arrives is one sorted piece
    a rank: no ids travel, and the receiver finds the experts' order by additions.

    Args:
        group: ranks that hold different experts; rank r holds the r-th share, by id.
        num_experts: of all ranks.
        overlap: compute what is beside the experts while tokens are on their way to them, else afterwards.
    """

    gathers_early = True
    """Rows are gathered before their number is known on the host, where nearly as many go somewhere as may."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, overlap: bool):
        self.group, self.overlap = group, overlap
        self.num_experts, self.local = num_experts, num_experts // group.size()
        self.rows_sent, self.rows_received = 0, 0
        """To and from other ranks, in the latest forward pass with gradients. Recomputation finds the same."""

    def arrange(self, experts: torch.Tensor, bound: int) -> tuple[Order, torch.Tensor]:
        """A row for each choice.

        Args:
            experts: int64 (T, slots), global ids; num_experts means nowhere.
            bound: at most so many go somewhere.

        Returns:
            Order of ``bound`` rows; int64 (n, m), what each rank is told: the rows it gets, as m parts.
        """
        order, rows = sort_rows(experts, self.num_experts, bound)
        return order, rows.view(-1, self.local)

    def label(
        self, order: Order, experts: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What travels with the rows of ``order``: weights float32 (R, 1), and local ids int32, or None if the receiver
        knows them.
        """
        return weights.flatten().gather(0, order.slot)[:, None], None

    def route(self, sent: list[list[int]], received: list[list[int]]) -> Route:
        """From what the ranks were told."""
        return Route([sum(parts) for parts in sent], [sum(parts) for parts in received], self.group)

    @torch.compiler.disable  # numbers of rows are read on the host
    def __call__(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        max_rows: int | None,
        run: Run,
        beside: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :class:`model.moe.Dispatcher` says; a collective over ``group``."""
        with torch.profiler.record_function(DISPATCH):
            bound = experts.numel() if max_rows is None else min(max_rows, experts.numel())
            order, told = self.arrange(experts, bound)
            counts = Counts(told, self.group)
            rows = spread(x, order) if self.gathers_early else None
            route = self.route(*counts.read())
            total = sum(route.sent)
            order = order.first(total)
            if rows is None:
                rows = spread(x, order)
            elif len(rows) > total:
                rows = rows[:total]
            weights, ids = self.label(order, experts, weights)
        if torch.is_grad_enabled():
            own = route.sent[self.group.rank()]
            self.rows_sent, self.rows_received = total - own, sum(route.received) - own
        out, back = Journey(route, DISPATCH), Journey(route, COMBINE, back=True)
        pending, pending_ids = out.start(rows, weights), out.send(() if ids is None else (ids,))
        other = beside() if beside is not None and self.overlap else None
        (rows, weights), arrived = out.finish(*pending), out.wait(pending_ids)
        del pending  # the experts may keep the rows in an order of their own
        (rows,) = back.finish(*back.start(self.run_experts(run, rows, weights, arrived, counts)))
        with torch.profiler.record_function(COMBINE):
            sums = collect(rows, order)
        return sums, beside() if beside is not None and not self.overlap else other

    def run_experts(
        self, run: Run, rows: torch.Tensor, weights: torch.Tensor, ids: tuple[torch.Tensor, ...], counts: Counts
    ) -> torch.Tensor:
        """The local experts on what has arrived: ``ids`` if they were sent, ``counts`` of the parts."""
        if len(rows) == 0:
            return self.run_nowhere(run, rows, weights)
        return run(rows, None, weights, len(rows), counts.received)

    def run_nowhere(self, run: Run, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The local experts on nothing. Kernels are given a row at least: one that goes nowhere."""
        rows, weights = F.pad(rows, (0, 0, 0, 1)), F.pad(weights, (0, 0, 0, 1))
        ids = torch.full(weights.shape, self.local, device=rows.device)
        return run(rows, ids, weights, 1)[:0]
