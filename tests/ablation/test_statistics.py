"""Statistics against published tables and known truths; the operating characteristics the report promises."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ablation.statistics import (
    Estimate,
    holm_adjust,
    holm_confidences,
    judge,
    judge_family,
    paired_estimate,
    pooled_spread,
    quantile,
    seeds_for,
    sign_flip_p,
    spread_of_differences,
    standard_deviation,
    unpaired_estimate,
)
from ablation.student_t import incomplete_beta, power_of, t_cdf, t_quantile

SEED_SD, ARM_SD = 0.010, 0.0090  # of the loss: shared by the arms of a pair, and an arm's own
LOSS, BAND = 3.0, 0.005
SPEED_SD, SPEED_BAND = 0.008, 0.01


@pytest.mark.parametrize(
    ("p", "df", "table"),
    [
        (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 4, 2.776), (0.975, 7, 2.365),
        (0.975, 30, 2.042), (0.95, 1, 6.314), (0.95, 5, 2.015), (0.9, 10, 1.372), (0.995, 2, 9.925),
        (0.995, 10, 3.169), (0.9995, 4, 8.610), (0.75, 1, 1.000), (0.975, 1e6, 1.960),
    ],
)  # fmt: skip
def test_t_quantiles_are_those_of_the_tables(p, df, table):
    assert t_quantile(p, df) == pytest.approx(table, abs=6e-4)
    assert t_quantile(1 - p, df) == -t_quantile(p, df)
    assert t_cdf(t_quantile(p, df), df) == pytest.approx(p, abs=1e-12)


def test_incomplete_beta_has_its_closed_forms():
    for x in (0.0, 0.01, 0.3, 0.5, 0.9, 1.0):
        assert incomplete_beta(1, 1, x) == pytest.approx(x, abs=1e-14)
        assert incomplete_beta(3, 1, x) == pytest.approx(x**3, abs=1e-14)
        assert incomplete_beta(0.5, 0.5, x) == pytest.approx(2 / math.pi * math.asin(math.sqrt(x)), abs=1e-13)


@pytest.mark.parametrize(
    ("n", "factor"), [(2, 8.98), (3, 2.48), (4, 1.59), (5, 1.24), (6, 1.05), (8, 0.84), (10, 0.72)]
)
def test_half_width_of_a_paired_interval_in_sds(n, factor):
    differences = [random.Random(n * 10 + i).gauss(0, 1) for i in range(n)]
    low, high = paired_estimate(differences).interval()
    assert (high - low) / 2 / standard_deviation(differences) == pytest.approx(factor, abs=0.006)


def test_welch_matches_a_worked_example():
    # Unequal variances, checked by hand: means 5 and 3, variances 2.5 and 0.5, n = 5 and 2.
    estimate = unpaired_estimate([3.0, 4.0, 5.0, 6.0, 7.0], [2.5, 3.5])
    a, b = 2.5 / 5, 0.5 / 2
    assert estimate.mean == -2.0
    assert estimate.error == pytest.approx(math.sqrt(a + b))
    assert estimate.df == pytest.approx((a + b) ** 2 / (a * a / 4 + b * b / 1))


def test_one_value_gives_no_interval_and_identical_values_a_point():
    assert paired_estimate([0.3]).interval() is None
    assert unpaired_estimate([1.0], [2.0, 3.0]).interval() is None
    assert paired_estimate([0.3, 0.3, 0.3]).interval() == (pytest.approx(0.3), pytest.approx(0.3))
    assert standard_deviation([0.1 + 0.2, 0.3 + 0.0]) > 0 and standard_deviation([0.7, 0.7, 0.7]) == 0.0


def test_sign_flip_p_is_exact_and_silent_below_six_seeds():
    assert sign_flip_p([1.0] * 5) is None
    assert sign_flip_p([1.0, 2.0, 1.5, 1.2, 0.9, 1.1]) == 2 / 64
    assert sign_flip_p([0.4, 0.1, 0.9, 0.2, 0.3, 0.8, 0.7, 0.5]) == 2 / 256
    mixed = [0.5, -0.2, 0.3, 0.4, -0.1, 0.6]
    count = sum(
        abs(sum(s * d for s, d in zip(signs, mixed, strict=True))) >= abs(sum(mixed)) - 1e-12
        for signs in itertools.product((1, -1), repeat=6)
    )
    assert sign_flip_p(mixed) == count / 64


def test_holm_against_a_worked_example():
    assert holm_adjust([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    # 0.005 <= 0.05/4 and 0.01 <= 0.05/3 are rejected, 0.03 > 0.05/2 stops the procedure there.
    assert holm_confidences([0.01, 0.04, 0.03, 0.005]) == pytest.approx([1 - 0.05 / 3, 0.975, 0.975, 1 - 0.05 / 4])


def test_an_interval_at_its_holm_level_clears_the_band_exactly_when_holm_rejects():
    rng = random.Random(3)
    for _ in range(300):
        arms = [paired_estimate([rng.gauss(rng.choice((0, 0.012)), 0.004) for _ in range(4)]) for _ in range(3)]
        rejected = [p <= 0.05 for p in holm_adjust([e.p_beyond(BAND) for e in arms])]
        said = [v.word in ("better", "worse") for v in judge_family(arms, BAND, lower_is_better=True)]
        assert said == rejected


def test_spreads():
    values = [1.0, 2.0, 4.0]
    pairs = [(a - b) ** 2 for a, b in itertools.combinations(values, 2)]
    assert spread_of_differences(values) == pytest.approx(math.sqrt(sum(pairs) / len(pairs)))
    assert pooled_spread([[1.0, 2.0], [5.0], [10.0, 13.0]]) == pytest.approx(math.sqrt((1 + 9) / 2))
    by_size = pooled_spread([[1.0, 2.0], [10.0, 13.0, 16.0]])  # variances 0.5 and 9, with 1 and 2 degrees of freedom
    assert by_size == pytest.approx(math.sqrt(2 * (0.5 + 2 * 9) / 3))
    assert pooled_spread([[1.0], [2.0]]) is None and spread_of_differences([1.0]) is None
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5 and quantile([1.0, 2.0, 3.0], 0.95) == pytest.approx(2.9)


def _estimate(low: float, high: float) -> Estimate:
    """Five seeds whose 95 % interval is low .. high."""
    return Estimate((low + high) / 2, (high - low) / 2 / t_quantile(0.975, 4), 4.0, 5, paired=True)


@pytest.mark.parametrize(
    ("low", "high", "lower_is_better", "word"),
    [
        (-0.004, 0.004, True, "equivalent"),
        (-0.0049, -0.001, True, "equivalent"),  # it excludes zero, and still is inside the band
        (-0.020, -0.006, True, "better"),
        (0.006, 0.020, True, "worse"),
        (0.006, 0.020, False, "better"),
        (-0.020, -0.006, False, "worse"),
        (-0.020, -0.001, True, "inconclusive"),
        (-0.006, 0.004, True, "inconclusive"),
        (-0.030, 0.030, True, "inconclusive"),
    ],
)
def test_words(low, high, lower_is_better, word):
    assert judge(_estimate(low, high), BAND, lower_is_better=lower_is_better).word == word


def test_equivalent_is_never_said_when_the_interval_leaves_the_band():
    rng = random.Random(11)
    said = 0
    for _ in range(3000):
        n, sd, shift = rng.randint(1, 8), 10 ** rng.uniform(-4, -2), rng.gauss(0, 0.004)
        verdict = judge(paired_estimate([rng.gauss(shift, sd) for _ in range(n)]), BAND, lower_is_better=True)
        if verdict.word == "equivalent":
            said += 1
            assert -BAND <= verdict.interval[0] <= verdict.interval[1] <= BAND
        if n == 1:
            assert verdict.word == "inconclusive" and verdict.interval is None
    assert said > 300


def test_without_a_band_only_identical_runs_are_equivalent():
    assert judge(paired_estimate([0.0, 0.0, 0.0]), 0.0, lower_is_better=True).word == "equivalent"
    assert judge(paired_estimate([1e-9, -1e-9, 2e-9]), 0.0, lower_is_better=True).word == "inconclusive"


def test_power_is_that_of_simulated_intervals():
    rng = random.Random(5)
    for n, ratio in ((3, 2.0), (5, 1.5), (12, 0.8)):
        clear = sum(paired_estimate([rng.gauss(ratio, 1) for _ in range(n)]).interval()[0] > 0 for _ in range(4000))
        assert power_of(ratio, n, 0.95) == pytest.approx(clear / 4000, abs=0.025)


def test_recommended_seeds():
    # Published one-sample tables, two-sided 5 %: effect 1.0 sd needs 10 for 80 % and 13 for 90 %; 0.5 sd needs 34
    # and 44.
    assert [seeds_for(1.0, 1.0, power=p) for p in (0.8, 0.9)] == [10, 13]
    assert [seeds_for(2.0, 1.0, power=p) for p in (0.8, 0.9)] == [34, 44]
    assert seeds_for(1e-6, 1.0) == 2
    assert seeds_for(1.0, 0.0) is None and seeds_for(100.0, 1.0) is None
    at_one = judge(paired_estimate([0.03]), BAND, lower_is_better=True, noise=0.01)
    assert at_one.needs == seeds_for(0.01, 0.025)
    at_four = judge(paired_estimate([0.0, 0.004, 0.008, 0.012]), BAND, lower_is_better=True)  # sd sqrt(80 / 3) 1e-3
    assert at_four.needs == seeds_for(math.sqrt(80 / 3) * 1e-3, 0.001)


def _loss_pairs(rng: random.Random, effect: float, n: int) -> list[float]:
    """Per-seed differences of two arms that share their seed's luck."""
    pairs = []
    for _ in range(n):
        luck = rng.gauss(0, SEED_SD)
        baseline, candidate = (LOSS + luck + shift + rng.gauss(0, ARM_SD) for shift in (0.0, effect))
        pairs.append(candidate - baseline)
    return pairs


def _speed_pairs(rng: random.Random, effect: float, n: int) -> list[float]:
    return [math.log(1 + effect) + rng.gauss(0, SPEED_SD) - rng.gauss(0, SPEED_SD) for _ in range(n)]


@pytest.mark.parametrize(("band", "seeds"), [(0.0, 2), (0.0, 3), (0.0, 5), (BAND, 3), (BAND, 8)])
def test_of_500_a_a_comparisons_at_most_35_name_a_winner(band, seeds):
    rng = random.Random(f"A/A {band} {seeds}")
    losses = [paired_estimate(_loss_pairs(rng, 0.0, seeds)) for _ in range(500)]
    speeds = [paired_estimate(_speed_pairs(rng, 0.0, seeds)) for _ in range(500)]
    for estimates, margin, lower in ((losses, band, True), (speeds, SPEED_BAND if band else 0.0, False)):
        words = [judge(e, margin, lower_is_better=lower).word for e in estimates]
        assert words.count("better") + words.count("worse") <= 35


def test_of_500_a_a_families_of_three_arms_at_most_35_name_a_winner():
    rng = random.Random("families")
    named = 0
    for _ in range(500):
        arms = [paired_estimate(_loss_pairs(rng, 0.0, 4)) for _ in range(3)]
        named += any(v.word in ("better", "worse") for v in judge_family(arms, 0.0, lower_is_better=True))
    assert named <= 35


@pytest.mark.parametrize(
    ("pairs", "effect", "band", "lower", "word"),
    [
        (_loss_pairs, -0.01 * LOSS, BAND, True, "better"),
        (_loss_pairs, +0.01 * LOSS, BAND, True, "worse"),
        (_speed_pairs, +0.03, SPEED_BAND, False, "better"),
        (_speed_pairs, -0.03, SPEED_BAND, False, "worse"),
    ],
)
def test_a_planted_effect_is_found_at_the_recommended_number_of_seeds(pairs, effect, band, lower, word):
    """A pilot of three seeds; where it is inconclusive, as many more as the report asks for."""
    rng = random.Random(f"{pairs.__name__} {effect}")
    found = asked = 0
    for _ in range(200):
        differences = pairs(rng, effect, 3)
        verdict = judge(paired_estimate(differences), band, lower_is_better=lower)
        if verdict.word == "inconclusive":
            asked += 1
            differences += pairs(rng, effect, (verdict.needs or 100) - 3)
            verdict = judge(paired_estimate(differences), band, lower_is_better=lower)
        found += verdict.word == word
    assert found >= 160
    assert asked > 60  # else the pilot alone would have decided, and the recommendation would be untested


@pytest.mark.parametrize("pairs, effect, band, sd", [
    (_loss_pairs, 0.01 * LOSS, BAND, math.sqrt(2) * ARM_SD), (_speed_pairs, 0.03, SPEED_BAND, math.sqrt(2) * SPEED_SD),
])  # fmt: skip
def test_a_planted_effect_is_found_when_the_noise_is_known(pairs, effect, band, sd):
    size = math.log1p(effect) if pairs is _speed_pairs else effect
    n = seeds_for(sd, size - band)
    rng = random.Random("known noise")
    words = [judge(paired_estimate(pairs(rng, effect, n)), band, lower_is_better=True).word for _ in range(200)]
    assert words.count("worse") >= 160 and words.count("better") == 0
