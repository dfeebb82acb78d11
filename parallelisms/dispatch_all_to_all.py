"""Tokens to experts on other ranks, once for each expert: the dispatcher of GShard (arXiv 2006.16668), without padding.

It stands where model/moe.py has its local dispatcher. The result is that of all experts on one rank: a token's weight
travels along and is applied where the expert is, so the router's gradient comes back the same way.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F

from parallelisms.token_exchange import Journey, Route, collect, plan, spread

DISPATCH, COMBINE = "moe.dispatch", "moe.combine"
"""Ranges of a profile: the way out and the way back, in forward and in backward."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]


class AllToAll:
    """Exchange of one layer's tokens.

    Args:
        group: ranks that hold different experts; rank r holds the r-th share, by id.
        num_experts: of all ranks.
        overlap: compute what is beside the experts while tokens are on their way to them, else afterwards.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, overlap: bool):
        self.group, self.overlap = group, overlap
        self.local = num_experts // group.size()
        self.rows_sent, self.rows_received = 0, 0
        """To and from other ranks, in the latest forward pass with gradients. Recomputation finds the same."""

    def pack(self, experts: torch.Tensor, weights: torch.Tensor) -> tuple[Route, torch.Tensor, torch.Tensor]:
        """A row for each choice: its route, and what travels with it.

        Args:
            experts: int64 (T, slots), global ids; num_experts means nowhere.
            weights: float32 (T, slots).

        Returns:
            Route of R rows, weights float32 (R, 1), local ids int32 (R, 1).
        """
        ranks = experts // self.local
        route = plan(ranks, ranks, self.group)
        ids = (experts % self.local).flatten()[route.slot]
        return route, weights.flatten().gather(0, route.slot)[:, None], ids[:, None].int()

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
            route, weights, ids = self.pack(experts, weights)
            rows = spread(x, route)
        if torch.is_grad_enabled():
            own = route.sent[self.group.rank()]
            self.rows_sent, self.rows_received = sum(route.sent) - own, sum(route.received) - own
        out, back = Journey(route, DISPATCH), Journey(route, COMBINE, back=True)
        pending, pending_ids = out.start(rows, weights), out.send((ids,))
        other = beside() if beside is not None and self.overlap else None
        (rows, weights), (ids,) = out.finish(*pending), out.wait(pending_ids)
        (rows,) = back.finish(*back.start(self._run(run, route, rows, weights, ids)))
        with torch.profiler.record_function(COMBINE):
            total = collect(rows, route)
        return total, beside() if beside is not None and not self.overlap else other

    def _run(
        self, run: Run, route: Route, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """The local experts on what has arrived. Kernels are given one row at least: one that goes nowhere."""
        arrived = len(rows)
        if arrived == 0:
            rows, weights = F.pad(rows, (0, 0, 0, 1)), F.pad(weights, (0, 0, 0, 1))
            ids = F.pad(ids, (0, 0, 0, 1), value=self.local)
        return run(rows, ids.long(), weights, max(1, route.assignments))[:arrived]
