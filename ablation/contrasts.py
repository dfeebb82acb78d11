"""What a design asks beyond each arm against the baseline: interactions of a factorial, single steps of a ladder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ablation.comparisons import Comparison, PartData
from ablation.statistics import paired_estimate


def contrasts(design: str, comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """An entry for each arm that combines others; estimated and not ranked.

    In a factorial the effect of ``a+b`` beyond the sum of those of ``a`` and ``b``: (a+b) - a - b + baseline. In a
    ladder the effect of the last step: ``a+b+c`` against ``a+b``. Differences of loss; for speed ratios, where effects
    multiply. A part is None where one of its comparisons is INVALID or not paired.
    """
    arms = {(c.sides.candidate[0].arm, c.sides.candidate[0].world_size): c for c in comparisons if c.tier == "paired"}
    found = []
    for (name, devices), whole in arms.items():
        parts = name.split("+")
        others = parts if design == "factorial" else ["+".join(parts[:-1])]
        terms = [arms[other, devices] for other in others if (other, devices) in arms]
        if design and len(parts) > 1 and len(terms) == len(others):
            found.append({
                "arm": whole.label,
                "kind": f"beyond {' and '.join(others)} together" if design == "factorial" else f"against {others[0]}",
                "loss": _without(whole.loss, [c.loss for c in terms]),
                "speed": _without(whole.speed, [c.speed for c in terms]),
            })  # fmt: skip
    return found


def _without(whole: PartData, parts: Sequence[PartData]) -> dict[str, Any] | None:
    """The effect of the whole without those of its parts, over the seeds that all have."""
    if any(part.invalid for part in (whole, *parts)):
        return None
    differences = [
        effect - sum(part.differences[seed] for part in parts)
        for seed, effect in whole.differences.items()
        if all(seed in part.differences for part in parts)
    ]
    if not differences:
        return None
    return paired_estimate(differences).table(math.exp if whole.ratio else float)
