"""Tokens to experts on other ranks, once for each *rank*: with k experts on fewer ranks most rows need not travel.

Choosing 8 of 64 experts at random on 8 ranks, a token needs 5.4 of them on average, so that this sends a third less
than a row for each choice. The sum over a rank's experts is taken there, and rounded there when rows are bfloat16.
"""

from collections.abc import Callable
from typing import Any

import torch

from parallelisms.dispatch_all_to_all import AllToAll, Visit
from parallelisms.token_exchange import Order, Route, sort_rows


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

    def assignments(self, visit: Visit, plan: Callable[..., list[Any]]) -> list[tuple[Any, int]]:
        """Ids as they were sent, last of all; what has arrived is sorted by them."""
        (ids,) = visit.labels.wait(0)
        return [(ids.long(), sum(choices for _, choices in visit.counts.read()[1]))]
