"""How the next token is chosen from its distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from config.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """Temperature, then the k most likely tokens, then the fewest of those that hold a share p of their probability.

    Nucleus sampling is Holtzman et al., arXiv 1904.09751; the order is that of transformers.

    Raises:
        ConfigError: a value out of its range.
    """

    temperature: float = 1.0
    """Divides the logits. 0: the most likely token, always."""
    top_k: int = 0
    """Tokens to choose among. 0: all."""
    top_p: float = 1.0
    """Share of the probability to choose within, in (0, 1]. The most likely token is always among them."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature {self.temperature}: must be 0 (the most likely token) or more.")
        if self.top_k < 0:
            raise ConfigError(f"--top_k {self.top_k}: must be 0 (all tokens) or more.")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"--top_p {self.top_p}: must be above 0 and at most 1 (all tokens).")


def choose(logits: torch.Tensor, sampling: Sampling, draws: torch.Tensor) -> torch.Tensor:
    """Token ids, one a row.

    Args:
        logits: (B, V).
        draws: float64 (B,), uniform in [0, 1). A row's token is a function of its logits and its draw.

    Returns:
        int64 (B,).
    """
    if sampling.temperature == 0.0:
        return logits.argmax(-1)
    # float64: summed in float32, the tail of a large vocabulary would be rounded away.
    scaled = logits.double()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / sampling.temperature
    probabilities, ids = scaled.softmax(-1).sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        probabilities[:, sampling.top_k :] = 0.0
        probabilities /= probabilities.sum(-1, keepdim=True)
    if sampling.top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = torch.where(before < sampling.top_p, probabilities, 0.0)
    ends = probabilities.cumsum(-1)
    place = torch.searchsorted(ends, (draws.to(ends.device)[:, None] * ends[:, -1:]), right=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1  # a draw times a rounded sum may fall on the end
    return ids.gather(-1, torch.minimum(place, last)).squeeze(-1)
