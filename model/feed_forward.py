"""The SwiGLU feed-forward layer (Shazeer, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F
from torch import nn


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """``w2(silu(w1 x) * w3 x)``: w1 is the gate, w3 the up and w2 the down projection."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        return self.w2(self.gated(self.w1(x), self.w3(x)))
