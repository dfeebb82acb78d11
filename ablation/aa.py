"""The A/A bands: how far the baseline is from itself, over disjoint seeds (loss) and over repeats of one seed
(speed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ablation.measures import throughput, value_at_tokens
from ablation.runs import Run
from ablation.sides import Sides
from ablation.statistics import paired_estimate, pooled_spread, spread_of_differences, unpaired_estimate
from ablation.validity import check_noise

BAND_FACTOR = 2.0  # a band is this many times the spread of A/A differences


def healthy(run: Run) -> bool:
    """DONE without a skipped step: fit to measure noise with."""
    return run.state == "DONE" and not run.finish.get("skipped_steps")


def noise_bands(baseline: Sequence[Run], paired_seeds: Sequence[str], metric: str, tokens: float) -> dict[str, Any]:
    """Bands of loss and speed from the baseline's runs, repeats included; {"loss": ..., "speed": ...}, each None
    if unknown.

    Loss: twice the root-mean-square difference of two different seeds, an upper bound for differences paired by
    seed. Speed: twice that of log tokens/s between repeats of one seed, as a ratio.

    ``against_itself`` is the A/A comparison: for loss the two disjoint sets of seeds, where there are some beyond
    ``paired_seeds`` (the difference's interval should hold 0), for speed the repeats against their first runs (the
    ratio's should hold 1).
    """
    same = (baseline[0].identity, baseline[0].record.get("corpus_hash"))
    fit = [run for run in baseline if healthy(run) and (run.identity, run.record.get("corpus_hash")) == same]
    first = {run.seed: run for run in reversed(fit) if run.repeat == 0}
    losses = {seed: value_at_tokens(run, metric, tokens) for seed, run in first.items()}
    known = {seed: v for seed, v in losses.items() if v is not None and math.isfinite(v)}
    sd = spread_of_differences(list(known.values()))
    loss: dict[str, Any] | None = None
    if sd is not None:
        loss = {
            "runs": len(known),
            "seeds": sorted(known),
            "spread": sd,
            "band": BAND_FACTOR * sd,
            "against_itself": None,
        }
        mine = [v for seed, v in known.items() if seed in paired_seeds]
        other = [v for seed, v in known.items() if seed not in paired_seeds]
        if len(mine) > 1 and len(other) > 1:
            estimate = unpaired_estimate(mine, other)
            loss["against_itself"] = {"difference": estimate.mean, "interval": estimate.interval(), "n": len(other)}
    rates: dict[str, list[float]] = {}
    moved: list[float] = []
    for run in sorted(fit, key=lambda run: run.repeat):
        rate = throughput(run)
        if rate is not None:
            rates.setdefault(run.seed, []).append(math.log(rate))
        value = value_at_tokens(run, metric, tokens)
        if run.repeat and value is not None and run.seed in known:
            moved.append(abs(value - known[run.seed]))
    repeated = [group for group in rates.values() if len(group) > 1]
    spread = pooled_spread(repeated)
    speed = None
    if spread is not None:
        ratios = paired_estimate([again - first for first, *others in repeated for again in others[:1]])
        interval = ratios.interval()
        speed = {
            "runs": sum(map(len, repeated)), "spread": math.expm1(spread), "band": math.expm1(BAND_FACTOR * spread),
            "log_band": BAND_FACTOR * spread, "repeat_loss_difference": max(moved, default=None),
            "against_itself": {
                "ratio": math.exp(ratios.mean), "interval": [math.exp(x) for x in interval] if interval else None,
                "n": ratios.n,
            },
        }  # fmt: skip
    return {"loss": loss, "speed": speed}


def noise_validity(sides: Sides) -> dict[str, list[dict[str, Any]]]:
    """A validity box for each set of A/A runs, by what it is. ``sides``: the baseline's runs that candidates meet, and
    all of its runs.
    """
    others = {
        "the same seeds again": [run for run in sides.candidate if run.repeat],
        "disjoint seeds": [run for run in sides.candidate if not run.repeat and run not in sides.baseline],
    }
    return {
        name: [asdict(item) for item in check_noise(replace(sides, candidate=runs))]
        for name, runs in others.items()
        if runs
    }
