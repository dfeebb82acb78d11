"""Tokens to experts on other ranks, once for each *rank*: with k experts on fewer ranks most rows need not travel.

Choosing 8 of 64 experts at random on 8 ranks, a token needs 5.4 of them on average, so that this sends a third less
than a row for each choice. The sum over a rank's experts is taken there, and rounded there when rows are bfloat16.
"""

import torch

from model.permute import Plan
from parallelisms.dispatch_all_to_all import AllToAll, Run, Visit
from parallelisms.token_exchange import Counts, Order, Route, sort_rows


class TokenOnce(AllToAll):
    """As :class:`AllToAll`, with a row for each rank that a token needs. Ids travel."""

    gathers_early = False

    def arrange(self, experts: torch.Tensor, bound: int) -> tuple[Order, torch.Tensor]:
        """A row for each pair of token and rank; a rank is told its rows and the choices of its experts among them."""
        ranks, n = experts // self.local, self.group.size()
        repeated = (ranks[:, :, None] == ranks[:, None, :]).tril(-1).any(-1)  # an earlier slot goes there already
        order, rows = sort_rows(torch.where(repeated, n, ranks), n, bound)
        chosen = (ranks.flatten()[:, None] == torch.arange(n, device=ranks.device)).sum(0)
        return order, torch.stack([rows, chosen], dim=1)

    def label(self, order: Order, experts: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All of the token's slots; those of other ranks hold the id "nowhere" and no weight: float32 (R, slots), int32
        (R, slots).
        """
        ranks = experts // self.local
        here = ranks[order.token] == ranks.flatten()[order.slot, None]
        ids = torch.where(here, experts[order.token] % self.local, self.local)
        return torch.where(here, weights.index_select(0, order.token), 0.0), ids.int()

    def routes(self, sent: list[list[int]], received: list[list[int]]) -> list[Route]:
        """The first number of each pair is that of rows."""
        return [Route([rows for rows, _ in sent], [rows for rows, _ in received], self.group)]

    def plans(self, counts: Counts, routes: list[Route]) -> list[Plan]:
        """None: what arrives is sorted by its ids."""
        return []

    def run_experts(self, run: Run, part: int, rows: torch.Tensor, weights: torch.Tensor, visit: Visit) -> torch.Tensor:
        """The local experts, one part, on what has arrived, sorted there."""
        (ids,) = visit.labels.wait(part)
        if len(rows) == 0:
            return self.run_nowhere(run, part, rows, weights)
        chosen = sum(choices for _, choices in visit.counts.read()[1])
        return run(rows, ids.long(), weights, chosen)
