"""Quantile balancing: the bias that would have balanced the batch just seen, without a step size.

Token i's *margin* for expert j is r_ij = alpha_i - s_ij: what j would have needed as a bias to be chosen, with alpha_i
the (k+1)-th largest s_i + b. An expert gets its fair T k / E tokens if its bias is the k / E quantile of its column of
margins. (Su, "quantile balancing", kexue.fm/archives/11619: one step of coordinate descent on the dual of the balanced
assignment problem.)

Two published algorithms, both presets here:

* ``megatron`` (Megatron-LM PR #5349, ``qb_dual_update``): s are logits; the exact quantile of each micro-batch,
  averaged over micro-batches and data ranks; old bias forgotten (EMA 0); mean-centred.
* ``kimi_k3`` (Megatron-LM PR #6637, torchtitan PR #4577, Kimi K3 report section 2.3.3 and appendix D): s are sigmoid
  scores; one quantile of the global batch from a histogram of 1000 bins over [min b - 1, max b + 1], interpolated;
  mean-centred.

``statistic = "column"`` leaves alpha out: the quantile of -s_ij alone, which balances a router that lets the number of
experts a token vary (kexue.fm/archives/11626).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from config.schema import Moe

BINS = 1000


@dataclass(frozen=True)
class QuantileRule:
    """A quantile algorithm, choice by choice."""

    score: Literal["logit", "sigmoid"]
    statistic: Literal["margin", "column"]
    pool: Literal["microbatch_mean", "global"]
    estimator: Literal["exact", "histogram"]
    center: bool


PRESETS = {
    "megatron": QuantileRule("logit", "margin", "microbatch_mean", "exact", center=True),
    "kimi_k3": QuantileRule("sigmoid", "margin", "global", "histogram", center=True),
}


def quantile_rule(moe: Moe) -> QuantileRule:
    """The rule of ``moe.quantile_preset``, or of the single keys for "custom"."""
    return PRESETS.get(moe.quantile_preset) or QuantileRule(
        moe.quantile_score, moe.quantile_statistic, moe.quantile_pool, moe.quantile_estimator, moe.quantile_center
    )


def margins(scores: torch.Tensor, cutoff: torch.Tensor, valid: torch.Tensor, statistic: str) -> torch.Tensor:
    """float32 (T, E): r_ij = alpha_i - s_ij, or -s_ij for "column"; +inf for padding, which sorts it out of the way.

    Args:
        scores: (T, E) without bias.
        cutoff: (T,), alpha.
    """
    found = cutoff[:, None] - scores if statistic == "margin" else -scores
    return torch.where(valid[:, None], found, torch.inf)


def exact_quantile(column: torch.Tensor, tokens: torch.Tensor, top_k: int) -> torch.Tensor:
    """The (floor(T k / E) + 1)-th smallest of each column: T k / E margins lie strictly below it (Megatron-LM #5349).

    Megatron asks T k to be divisible by E; here the share is rounded down.

    Args:
        column: (N, E), +inf where there is no token.
        tokens: int64 scalar T, finite rows of ``column``. A tensor, so that the host need not wait.

    Returns:
        float32 (E,).
    """
    rank = (tokens * top_k // column.shape[1]).clamp(max=column.shape[0] - 1)
    return column.sort(dim=0).values.index_select(0, rank.view(1)).squeeze(0)


def histogram_range(bias: torch.Tensor, rule: QuantileRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower end and width of the bins: a margin of scores in [0, 1] lies in [min b - 1, max b + 1].

    Logits have no bound; their margins are binned over sixteen times that width and clamped to its ends.
    """
    reach = 1.0 if rule.score == "sigmoid" else 16.0
    low = bias.min() - reach
    return low, (bias.max() + reach - low) / BINS


def histogram(found: torch.Tensor, valid: torch.Tensor, bias: torch.Tensor, rule: QuantileRule) -> torch.Tensor:
    """int64 (E, BINS): how many margins of valid tokens fall into each bin.

    Args:
        found: (T, E), from :func:`margins`.
        bias: (E,), the bias the tokens were routed with; it sets the range.
    """
    low, width = histogram_range(bias, rule)
    bins = torch.where(valid[:, None], (found - low) / width, 0.0).floor().clamp(0, BINS - 1).long()
    ones = valid[:, None].expand_as(bins).long()
    return ones.new_zeros(found.shape[1], BINS).scatter_add(1, bins.T, ones.T)


def histogram_quantile(counts: torch.Tensor, bias: torch.Tensor, top_k: int, rule: QuantileRule) -> torch.Tensor:
    """The k / E quantile of each expert's histogram, interpolated within the bin where it is crossed.

    Args:
        counts: int64 (E, BINS), of the global batch.
        bias: (E,), as given to :func:`histogram`.

    Returns:
        float32 (E,).
    """
    low, width = histogram_range(bias, rule)
    # float64: a share of 10^8 tokens is not exact in float32.
    target = counts.sum(1).double() * top_k / counts.shape[0]
    upto = counts.cumsum(1)
    crossed = (upto < target.ceil().long()[:, None]).sum(1, keepdim=True).clamp(max=BINS - 1)
    inside = counts.gather(1, crossed).squeeze(1)
    before = upto.gather(1, crossed).squeeze(1) - inside
    position = crossed.squeeze(1) + (target - before) / inside.clamp(min=1)
    return (low + position * width).float()


def pooled_quantile(
    column: torch.Tensor, tokens: torch.Tensor, top_k: int, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """:func:`exact_quantile` of columns whose rows lie on several ranks, with sums over ranks and nothing else.

    Bisects the 32 bits of a float for the smallest value that more than T k / E margins do not exceed: exact, not
    approximate.

    Args:
        column: float32 (N, E) of this rank.
        tokens: int64 scalar, valid tokens of all ranks.
        reduce: sums an int64 tensor over ranks.
    """
    order = _sortable(column)
    wanted = tokens * top_k // column.shape[1]
    low = torch.full((column.shape[1],), -(1 << 31), dtype=torch.int64, device=column.device)
    high = torch.full_like(low, (1 << 31) - 1)
    for _ in range(32):
        middle = (low + high) // 2
        enough = reduce((order <= middle).sum(0)) > wanted
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle + 1)
    return _from_sortable(high)


def _sortable(x: torch.Tensor) -> torch.Tensor:
    """int64 whose order is that of the float32 ``x``."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF) - 1)


def _from_sortable(order: torch.Tensor) -> torch.Tensor:
    bits = torch.where(order >= 0, order, (-(order + 1)) | -(1 << 31))
    return bits.to(torch.int32).view(torch.float32)
