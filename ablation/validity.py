"""The validity box: what must hold before a difference between two arms means anything.

Each check looks at the runs of both sides and says ok, or what is wrong and what that costs: an INVALID verdict, or a
comparison that is no longer paired. It trusts nothing that can be computed again from the run directories.
"""

from __future__ import annotations

from collections.abc import Sequence

from ablation import health, sameness
from ablation.sides import Item, Part, Sides, Status


def check_validity(sides: Sides) -> list[Item]:
    """Every check, in the order of the box. Both sides hold at least one run."""
    return [check(sides) for check in (*sameness.CHECKS, *health.CHECKS)]


def check_noise(sides: Sides) -> list[Item]:
    """The checks of two sets of the baseline's own runs: on the same seeds again, or on disjoint ones."""
    left_out = (sameness.one_variable, *(() if sides.pairs else (sameness.seeds,)))
    checks = [check for check in (*sameness.CHECKS, *health.CHECKS) if check not in left_out]
    return [sameness.nothing_changed(sides), *(check(sides) for check in checks)]


def reasons(items: Sequence[Item], part: Part, status: Status) -> list[str]:
    """Why this part ("loss" or "speed") of the comparison is "INVALID", or "unpaired"; empty if it is not."""
    return [f"{item.name}: {item.reason}" for item in items if item.status == status and part in item.spoils]
