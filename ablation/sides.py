"""The two sides of a comparison, and one line of the box that says whether they may be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ablation.runs import Run

Part = Literal["loss", "speed"]
Status = Literal["ok", "warning", "unpaired", "INVALID"]


@dataclass(frozen=True)
class Sides:
    """What is compared: at least one run of each side, the [ablation] table, and the decision (metric after
    tokens).
    """

    baseline: Sequence[Run]
    candidate: Sequence[Run]
    question: dict[str, Any]
    metric: str
    tokens: float

    @property
    def pairs(self) -> list[tuple[Run, Run]]:
        """(baseline, candidate) of each seed both sides have."""
        mine = {run.seed: run for run in self.baseline}
        return [(mine[run.seed], run) for run in self.candidate if run.seed in mine]

    @property
    def runs(self) -> list[Run]:
        """Both sides."""
        return [*self.baseline, *self.candidate]


@dataclass(frozen=True)
class Item:
    """One line of the box. ``spoils``: the parts of the comparison that a status other than ok or warning costs."""

    name: str
    status: Status
    reason: str = ""
    spoils: tuple[Part, ...] = ("loss", "speed")


def declared_variables(question: dict[str, Any]) -> list[str]:
    """The variable (or variables, of a factorial or a ladder) of an [ablation] table."""
    variable = question.get("variable") or []
    return [variable] if isinstance(variable, str) else list(variable)


def listed(names: Iterable[Any]) -> str:
    """Names with commas between, for a message."""
    return ", ".join(str(name) for name in names)
