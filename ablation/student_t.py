"""Student's t without scipy: distribution, quantiles, and the power of an interval built on it."""

from __future__ import annotations

import math
from functools import lru_cache


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by Lentz's continued fraction (Abramowitz and Stegun
    26.5.8).
    """
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction converges quickly on the other side only
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1.0 / max(1.0 - (a + b) * x / (a + 1.0), tiny)
    fraction = d
    for m in range(1, 500):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0)),
        ):
            d = 1.0 + numerator * d
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = 1.0 + numerator / c
            c = c if abs(c) > tiny else tiny
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction / a


def t_cdf(t: float, df: float) -> float:
    """P(T <= t) of Student's t with ``df`` degrees of freedom (not necessarily whole, for Welch)."""
    tail = 0.5 * incomplete_beta(df / 2.0, 0.5, df / (df + t * t))
    return tail if t < 0 else 1.0 - tail


@lru_cache(maxsize=4096)
def t_quantile(p: float, df: float) -> float:
    """The t with ``t_cdf(t, df) = p``, by bisection. ``0 < p < 1``."""
    if p < 0.5:
        return -t_quantile(1.0 - p, df)
    low, high = 0.0, 2.0
    while t_cdf(high, df) < p:
        low, high = high, high * 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2.0


def power_of(ratio: float, n: int, confidence: float) -> float:
    """Chance that an interval of n differences stays clear of a point ``ratio`` standard deviations from their mean.

    The mean over the sample's own sd s (s^2 (n - 1) is chi-squared) of Phi(ratio sqrt(n) - t s): one tail of the
    noncentral t distribution, by Simpson's rule.
    """
    df, t = n - 1.0, t_quantile(0.5 + confidence / 2.0, n - 1.0)
    top, intervals = 1.0 + 8.0 / math.sqrt(2.0 * df), 100
    log_scale = math.log(2.0) + 0.5 * df * math.log(df / 2.0) - math.lgamma(df / 2.0)
    total = 0.0
    for i in range(intervals + 1):
        s = top * i / intervals
        if s == 0.0:
            density = math.exp(log_scale) if df == 1.0 else 0.0
        else:
            density = math.exp(log_scale + (df - 1.0) * math.log(s) - 0.5 * df * s * s)
        weight = 1.0 if i in (0, intervals) else 4.0 if i % 2 else 2.0
        total += weight * density * 0.5 * math.erfc((t * s - ratio * math.sqrt(n)) / math.sqrt(2.0))
    return total * top / intervals / 3.0
