"""Tokens to experts on other ranks, once for each *rank*: with k experts on fewer ranks most rows need not travel.

Choosing 8 of 64 experts at random on 8 ranks, a token needs 5.4 of them on average, so that this sends a third less
than a row for each choice. The sum over a rank's experts is taken there, and rounded there when rows are bfloat16.
"""

import torch

from parallelisms.dispatch_all_to_all import AllToAll
from parallelisms.token_exchange import Route, plan


class TokenOnce(AllToAll):
    """As :class:`AllToAll`, with a row for each rank that a token needs."""

    def pack(self, experts: torch.Tensor, weights: torch.Tensor) -> tuple[Route, torch.Tensor, torch.Tensor]:
        """A row for each pair of token and rank. What travels with it has all of the token's slots; those of other
        ranks hold the id "nowhere" and no weight: float32 (R, slots), int32 (R, slots).
        """
        ranks = experts // self.local
        repeated = (ranks[:, :, None] == ranks[:, None, :]).tril(-1).any(-1)  # an earlier slot goes there already
        route = plan(torch.where(repeated, self.group.size(), ranks), ranks, self.group)
        here = ranks[route.token] == ranks.flatten()[route.slot, None]
        ids = torch.where(here, experts[route.token] % self.local, self.local)
        return route, torch.where(here, weights.index_select(0, route.token), 0.0), ids.int()
