"""One arm against the baseline: estimates of loss and speed, every metric of the paired table, cost, validity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ablation.measures import (
    MEASURES,
    Measure,
    held_out_measures,
    lower_is_better,
    padding_measures,
    seconds_at_tokens,
    seconds_to_reach,
    throughput,
    value_at_seconds,
    value_at_tokens,
)
from ablation.runs import Run, config_difference, derived_difference
from ablation.sameness import change_of
from ablation.sides import Item, Part, Sides
from ablation.statistics import (
    INDICATIVE_SEEDS,
    MOST_SEEDS,
    Estimate,
    Verdict,
    holm_adjust,
    judge_family,
    mean,
    paired_estimate,
    sign_flip_p,
    standard_deviation,
    unpaired_estimate,
)
from ablation.validity import check_validity, reasons

ROUNDING = 1e-5
"""Of a loss: arms that compute the same in another order end this near each other, on either side."""

Values = dict[str, float]


def _by_seed(baseline: Values, candidate: Values) -> Values:
    """candidate - baseline of the seeds that both have."""
    return {seed: value - baseline[seed] for seed, value in candidate.items() if seed in baseline}


def difference(baseline: Values, candidate: Values, *, paired: bool) -> Estimate | None:
    """candidate - baseline, over the seeds that both have or of the means; None where nothing is left to compare."""
    if paired:
        differences = _by_seed(baseline, candidate)
        return paired_estimate(list(differences.values())) if differences else None
    if not baseline or not candidate:
        return None
    return unpaired_estimate(list(baseline.values()), list(candidate.values()))


@dataclass
class PartData:
    """Loss or speed of a comparison, before and after judgement."""

    baseline: Values
    candidate: Values
    invalid: list[str]
    unpaired: list[str]
    ratio: bool
    estimate: Estimate | None = None
    differences: Values = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.differences = {} if self.unpaired else _by_seed(self.baseline, self.candidate)
        self.estimate = difference(self.baseline, self.candidate, paired=not self.unpaired)


@dataclass
class Comparison:
    """An arm beside its baseline, by their labels. ``role``: "candidate" or "reference"."""

    label: str
    baseline: str
    role: str
    sides: Sides
    items: list[Item]
    loss: PartData
    speed: PartData
    tier: str


def finite_values(runs: Sequence[Run], of: Callable[[Run], float | None]) -> Values:
    """A number of each run by seed, runs without it (or with NaN) left out."""
    values = {run.seed: of(run) for run in runs}
    return {seed: v for seed, v in values.items() if v is not None and math.isfinite(v)}


def _log_rate(run: Run) -> float | None:
    rate = throughput(run)
    return None if rate is None else math.log(rate)


def compare_sides(
    label: str, baseline: str, role: str, sides: Sides, extra: Sequence[Item] = (), *, tier: str = "paired"
) -> Comparison:
    """Check both sides, labelled as in the report, and estimate the differences. ``extra``: further lines of the
    box; ``tier``: "paired" or "bridged" where the seeds pair, "unpaired" to forbid pairing."""
    items = [*check_validity(sides), *extra]
    if tier == "unpaired":
        items.append(Item("baseline run together with the arm", "unpaired", "the baseline is from an older directory"))

    def part(name: Part, of: Callable[[Run], float | None], ratio: bool) -> PartData:
        return PartData(
            finite_values(sides.baseline, of), finite_values(sides.candidate, of),
            reasons(items, name, "INVALID"), reasons(items, name, "unpaired"), ratio,
        )  # fmt: skip

    loss = part("loss", lambda run: value_at_tokens(run, sides.metric, sides.tokens), ratio=False)
    speed = part("speed", _log_rate, ratio=True)
    return Comparison(label, baseline, role, sides, items, loss, speed, "unpaired" if loss.unpaired else tier)


def phrase(verdict: Verdict, band: float, n: int, unit: str = "") -> str:
    """The verdict in the report's words."""
    if verdict.word == "equivalent":
        text = f"equivalent within {band:.3g}{unit}"
    elif verdict.word == "inconclusive":
        text = f"inconclusive (needs n~{verdict.needs})" if verdict.needs else f"inconclusive (needs n>{MOST_SEEDS})"
    else:
        text = verdict.word
    return text + (", n = 1" if n == 1 else ", indicative" if n <= INDICATIVE_SEEDS else "")


def _part_table(part: PartData, verdict: Verdict | None, p_value: float | None, band: float) -> dict[str, Any]:
    """report.json's entry of a part; ratios as candidate / baseline, differences as candidate - baseline."""
    show = math.exp if part.ratio else float
    estimate = part.estimate
    interval95 = estimate.interval() if estimate else None
    table: dict[str, Any] = {
        "baseline": {seed: show(v) for seed, v in part.baseline.items()},
        "candidate": {seed: show(v) for seed, v in part.candidate.items()},
        "per_seed": {seed: show(d) for seed, d in part.differences.items()},
        "value": show(estimate.mean) if estimate else None,
        "interval_95": [show(x) for x in interval95] if interval95 else None,
        "n": estimate.n if estimate else 0,
        "paired": estimate.paired if estimate else False,
        "band": math.expm1(band) if part.ratio else band,
        "word": None, "phrase": None, "interval": None, "confidence": None, "needs": None, "p_value": p_value,
        "invalid": part.invalid, "unpaired": part.unpaired,
    }  # fmt: skip
    if verdict is not None and estimate is not None:
        unit = " %" if part.ratio else ""
        table |= {
            "word": verdict.word,
            "phrase": phrase(verdict, 100 * math.expm1(band) if part.ratio else band, estimate.n, unit),
            "interval": [show(x) for x in verdict.interval] if verdict.interval else None,
            "confidence": verdict.confidence,
            "needs": verdict.needs,
        }
    elif part.invalid or estimate is None:
        table |= {
            "word": "INVALID",
            "phrase": "INVALID",
            "interval": table["interval_95"],
            "invalid": part.invalid or ["no run of one side has the number"],
        }
    else:
        table |= {"word": "reference", "phrase": "reference, not ranked", "interval": table["interval_95"]}
    return table


def judge_parts(
    comparisons: Sequence[Comparison], name: Part, metric: str, band: float, noise: float | None
) -> list[dict[str, Any]]:
    """Judge one part of all comparisons as a family (Holm): candidates that are valid; references are not ranked.

    ``band`` and ``noise`` are in the part's own unit: the metric's for loss, log ratio for speed.
    """  # fmt: skip
    parts = [comparison.loss if name == "loss" else comparison.speed for comparison in comparisons]
    ranked = [
        i for i, (c, part) in enumerate(zip(comparisons, parts, strict=True))
        if c.role == "candidate" and part.estimate is not None and not part.invalid
    ]  # fmt: skip
    lower = lower_is_better(metric) if name == "loss" else False
    estimates = [estimate for i in ranked if (estimate := parts[i].estimate) is not None]
    verdicts = dict(zip(ranked, judge_family(estimates, band, lower_is_better=lower, noise=noise), strict=True))
    raw = {i: sign_flip_p(list(parts[i].differences.values())) for i in ranked}
    known = [i for i in ranked if raw[i] is not None]
    adjusted = dict(zip(known, holm_adjust([p for i in known if (p := raw[i]) is not None]), strict=True))
    return [_part_table(part, verdicts.get(i), adjusted.get(i), band) for i, part in enumerate(parts)]


def summary(values: Values) -> dict[str, Any] | None:
    """Mean, sd (None at n = 1), count and the values by seed; None without values."""
    numbers = list(values.values())
    if not numbers:
        return None
    return {"mean": mean(numbers), "sd": standard_deviation(numbers), "n": len(numbers), "values": values}


def metric_row(measure: Measure, sides: Sides, paired: bool) -> dict[str, Any] | None:
    """A row of the paired table; None where neither side has the number."""
    base = finite_values(sides.baseline, lambda run: measure.value(run, sides.tokens))
    candidate = finite_values(sides.candidate, lambda run: measure.value(run, sides.tokens))
    if not base and not candidate:
        return None
    ratio = measure.ratio and all(v > 0 for v in (*base.values(), *candidate.values()))
    logs = [{seed: math.log(v) for seed, v in side.items()} if ratio else side for side in (base, candidate)]
    estimate = difference(logs[0], logs[1], paired=paired)
    nothing = {"value": None, "interval": None, "n": 0}
    return {
        "name": measure.name, "unit": measure.unit, "note": measure.note, "kind": "ratio" if ratio else "difference",
        "baseline": summary(base), "candidate": summary(candidate),
        **(estimate.table(math.exp if ratio else float) if estimate else nothing),
    }  # fmt: skip


def equal_time(sides: Sides) -> dict[str, Any] | None:
    """The metric of both sides after the same training seconds: for each pair, when the quicker of the two reaches
    the decision. Only pairs count; None without one."""
    differences: Values = {}
    for base, candidate in sides.pairs:
        times = [seconds_at_tokens(run, sides.tokens) for run in (base, candidate)]
        if times[0] is None or times[1] is None:
            continue
        limit = min(times[0], times[1])
        values = [value_at_seconds(run, sides.metric, limit) for run in (base, candidate)]
        if values[0] is not None and values[1] is not None and math.isfinite(values[1] - values[0]):
            differences[candidate.seed] = values[1] - values[0]
    return paired_estimate(list(differences.values())).table() | {"per_seed": differences} if differences else None


def cost_to_baseline_loss(sides: Sides) -> dict[str, Any] | None:
    """Device-hours to the loss at which the baseline's run of the same seed ended, to :data:`ROUNDING`, and their ratio
    to the baseline's own.
    """
    if not lower_is_better(sides.metric) or not sides.pairs:
        return None
    own, needed, logs = {}, {}, {}
    for base, candidate in sides.pairs:
        target, ended = value_at_tokens(base, sides.metric, sides.tokens), seconds_at_tokens(base, sides.tokens)
        if target is None or not math.isfinite(target) or not ended:
            continue
        own[base.seed] = ended * base.world_size / 3600.0
        reached = seconds_to_reach(candidate, sides.metric, target + ROUNDING * abs(target))
        if reached:
            needed[candidate.seed] = reached * candidate.world_size / 3600.0
            logs[candidate.seed] = math.log(needed[candidate.seed] / own[base.seed])
    if not own:
        return None
    # A mean over those that got there would hide those that did not.
    estimate = paired_estimate(list(logs.values())) if len(logs) == len(own) else None
    interval = estimate.interval() if estimate else None
    return {
        "baseline": summary(own), "candidate": summary(needed), "reached": len(needed), "of": len(own),
        "value": math.exp(estimate.mean) if estimate else None,
        "interval": [math.exp(x) for x in interval] if interval else None,
    }  # fmt: skip


def comparison_table(c: Comparison, loss: dict[str, Any], speed: dict[str, Any], expected: str) -> dict[str, Any]:
    """report.json's entry of one comparison."""
    base, candidate = c.sides.baseline[0], c.sides.candidate[0]
    roots, followers, _ = change_of(c.sides)
    changed = config_difference(base, candidate)
    expectation = None
    if expected == "loss-neutral" and c.role == "candidate" and loss["word"] != "INVALID":
        expectation = {"equivalent": "held", "better": "violated", "worse": "violated"}.get(loss["word"], "open")
    rows = [
        metric_row(measure, c.sides, paired=not (c.speed if measure.ratio else c.loss).unpaired)
        for measure in (*MEASURES, *padding_measures(c.sides.runs), *held_out_measures(c.sides.runs))
    ]
    return {
        "arm": c.label, "baseline": c.baseline, "role": c.role, "tier": c.tier,
        "devices": candidate.world_size, "seeds": [run.seed for run in c.sides.candidate],
        "loss": loss, "speed": speed, "expectation": expectation,
        "variable": {k: list(changed[k]) for k in sorted(roots)},
        "followers": {k: list(changed[k]) for k in sorted(followers)},
        "derived": {k: list(v) for k, v in derived_difference(base, candidate).items()},
        "metrics": [row for row in rows if row],
        "equal_time": equal_time(c.sides), "cost": cost_to_baseline_loss(c.sides),
        "validity": [asdict(item) for item in c.items],
    }  # fmt: skip
