"""Statistics for three to eight seeds: Student-t intervals, Welch, sign-flip p values, Holm, verdicts against a band.

Everything here works on plain numbers, so the tests drive the very functions the report uses. Estimates of loss
are in the metric's unit; estimates of speed are natural logarithms of ratios.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ablation.student_t import power_of, t_cdf, t_quantile

CONFIDENCE = 0.95
POWER = 0.9  # of the recommended number of seeds; the sd it rests on is itself a guess from few
MOST_SEEDS = 100  # beyond this a recommendation is no plan: the difference is as large as the band
P_VALUE_SEEDS = 6  # the smallest two-sided sign-flip p at n = 5 is 0.0625: nothing to claim
INDICATIVE_SEEDS = 3


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def standard_deviation(values: Sequence[float]) -> float | None:
    """Unbiased sample standard deviation; None for fewer than two values. Exactly 0 for equal values."""
    if len(values) < 2:
        return None
    if min(values) == max(values):
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def quantile(values: Sequence[float], q: float) -> float:
    """Linear-interpolation quantile of at least one value, ``0 <= q <= 1`` (numpy's default rule)."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class Estimate:
    """A difference: its mean, the standard error of that mean, degrees of freedom, and seeds behind it.

    ``error`` and ``df`` are None where one seed gives no interval.
    """

    mean: float
    error: float | None
    df: float | None
    n: int
    paired: bool

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Two-sided Student-t interval for the mean, or None at n = 1."""
        if self.error is None or self.df is None:
            return None
        if self.error == 0.0:
            return self.mean, self.mean
        half = t_quantile(0.5 + confidence / 2.0, self.df) * self.error
        return self.mean - half, self.mean + half

    def p_beyond(self, band: float) -> float:
        """Two-sided p of "|difference| <= band": at most alpha exactly when the (1 - alpha) interval clears the
        band.
        """
        if self.error is None or self.df is None:
            return 1.0
        excess = abs(self.mean) - band
        if self.error == 0.0:
            return 0.0 if excess > 0 else 1.0
        return min(1.0, 2.0 * t_cdf(-excess / self.error, self.df))

    def table(self, show: Callable[[float], float] = float) -> dict[str, Any]:
        """report.json's entry: {"value", "interval" at 95 % (None at n = 1), "n"}, numbers as ``show`` gives them."""
        interval = self.interval()
        shown = [show(end) for end in interval] if interval else None
        return {"value": show(self.mean), "interval": shown, "n": self.n}


def paired_estimate(differences: Sequence[float]) -> Estimate:
    """Mean of per-seed differences; Student-t with n - 1 degrees of freedom."""
    sd = standard_deviation(differences)
    n = len(differences)
    if sd is None:
        return Estimate(differences[0], None, None, n, paired=True)
    return Estimate(mean(differences), sd / math.sqrt(n), n - 1.0, n, paired=True)


def unpaired_estimate(baseline: Sequence[float], candidate: Sequence[float]) -> Estimate:
    """Difference of means, candidate - baseline; Welch's error and degrees of freedom."""
    difference = mean(candidate) - mean(baseline)
    n = min(len(baseline), len(candidate))
    sds = standard_deviation(baseline), standard_deviation(candidate)
    if sds[0] is None or sds[1] is None:
        return Estimate(difference, None, None, n, paired=False)
    a, b = sds[0] ** 2 / len(baseline), sds[1] ** 2 / len(candidate)
    if a + b == 0.0:
        return Estimate(difference, 0.0, float(len(baseline) + len(candidate) - 2), n, paired=False)
    df = (a + b) ** 2 / (a * a / (len(baseline) - 1) + b * b / (len(candidate) - 1))
    return Estimate(difference, math.sqrt(a + b), df, n, paired=False)


def sign_flip_p(differences: Sequence[float]) -> float | None:
    """Exact two-sided sign-flip p of "differences are symmetric about 0"; None below six seeds (see P_VALUE_SEEDS).

    Above 16 seeds the 2^n sign patterns are replaced by the t test's p, which is then indistinguishable.
    """
    n = len(differences)
    if n < P_VALUE_SEEDS:
        return None
    if n > 16:
        return paired_estimate(differences).p_beyond(0.0)
    observed = abs(math.fsum(differences))
    tolerance = 1e-12 * math.fsum(abs(d) for d in differences)
    extreme = sum(
        abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True))) >= observed - tolerance
        for signs in itertools.product((1.0, -1.0), repeat=n)
    )
    return float(extreme / 2**n)


def holm_adjust(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the order given."""
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = running
    return adjusted


def holm_confidences(p_values: Sequence[float], confidence: float = CONFIDENCE) -> list[float]:
    """Confidence at which Holm's procedure looks at each hypothesis: 1 - alpha / (m - i) for the i-th smallest p.

    Hypotheses that are not rejected all get the level at which the procedure stopped, so that an interval clears
    the band exactly when Holm rejects.
    """
    alpha, m = 1.0 - confidence, len(p_values)
    levels = [confidence] * m
    stopped: float | None = None
    for rank, index in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        level = alpha / (m - rank)
        if stopped is None and p_values[index] > level:
            stopped = level
        levels[index] = 1.0 - (level if stopped is None else stopped)
    return levels


def spread_of_differences(values: Sequence[float]) -> float | None:
    """Root mean square of all pairwise differences, which is sqrt(2) sd; None for fewer than two values.

    Of baseline runs on different seeds it is the noise an unpaired comparison has: an upper bound for a paired one.
    """
    sd = standard_deviation(values)
    return None if sd is None else math.sqrt(2.0) * sd


def pooled_spread(groups: Sequence[Sequence[float]]) -> float | None:
    """``spread_of_differences`` within groups, pooled over groups of two or more values by degrees of freedom."""
    squares, df = 0.0, 0
    for group in groups:
        sd = standard_deviation(group)
        if sd is not None:
            squares += sd * sd * (len(group) - 1)
            df += len(group) - 1
    return math.sqrt(2.0 * squares / df) if df else None


@lru_cache(maxsize=4096)
def seeds_for(sd: float, gap: float, confidence: float = CONFIDENCE, power: float = POWER) -> int | None:
    """Smallest n >= 2 whose interval of differences with this sd stays ``gap`` away from their mean with this power.

    None if that takes more than MOST_SEEDS, or ``gap`` is not positive.
    """
    if gap <= 0.0 or (sd > 0.0 and power_of(gap / sd, MOST_SEEDS, confidence) < power):
        return None
    low, high = 2, MOST_SEEDS  # more seeds never have less power
    while sd > 0.0 and low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(gap / sd, middle, confidence) >= power else (middle + 1, high)
    return low


Word = Literal["better", "worse", "equivalent", "inconclusive", "INVALID"]


@dataclass(frozen=True)
class Verdict:
    """What may be said of one difference. ``needs`` is a number of seeds; None with "inconclusive": more than
    MOST_SEEDS.
    """

    word: Word
    interval: tuple[float, float] | None
    confidence: float
    needs: int | None = None


def judge(
    estimate: Estimate,
    band: float,
    *,
    lower_is_better: bool,
    confidence: float = CONFIDENCE,
    noise: float | None = None,
) -> Verdict:
    """The interval against the band -band .. +band.

    Wholly inside: equivalent. Wholly beyond: better or worse. Across an edge: inconclusive, with the seeds that
    would settle it. Without a band (0) "beyond" means it excludes zero, and only identical runs are equivalent.
    ``noise``: sd of a difference known from elsewhere (the A/A runs), for the recommendation at n = 1.
    """
    interval = estimate.interval(confidence)
    if interval is not None:
        low, high = interval
        if low >= -band and high <= band:
            return Verdict("equivalent", interval, confidence)
        if high < -band or low > band:
            return Verdict("better" if (high < 0) == lower_is_better else "worse", interval, confidence)
    gap = abs(abs(estimate.mean) - band)
    sd = noise if estimate.error is None else estimate.error * math.sqrt(estimate.n)
    needs = INDICATIVE_SEEDS if sd is None else seeds_for(sd, gap, confidence)
    return Verdict("inconclusive", interval, confidence, None if needs is None else max(needs, estimate.n + 1))


def judge_family(
    estimates: Sequence[Estimate],
    band: float,
    *,
    lower_is_better: bool,
    noise: float | None = None,
    confidence: float = CONFIDENCE,
) -> list[Verdict]:
    """``judge`` for several arms against one baseline, each at its Holm level, so that ``confidence`` holds for
    the family.
    """
    levels = holm_confidences([e.p_beyond(band) for e in estimates], confidence)
    return [
        judge(e, band, lower_is_better=lower_is_better, confidence=level, noise=noise)
        for e, level in zip(estimates, levels, strict=True)
    ]
