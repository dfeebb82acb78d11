"""The [ablation] table. See config/schema.py for how a schema is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from config.field import key


@dataclass
class Decide:
    """When and by what the arms of an ablation are judged."""

    metric: str = "validation_metrics/loss"
    """Tag of metrics.jsonl that decides."""
    step: int = key(0, minimum=0)
    """Step at which it is read. 0: the last step."""
    equivalent_within: float | None = key(None, minimum=0.0)
    """Difference, in the metric's unit, below which two arms count as equivalent. Unset: twice the spread of the A/A
    runs; without those, only identical arms are equivalent."""


@dataclass
class Ablation:
    """The [ablation] table of an ablation file. Not part of a run's configuration: one file holds many runs."""

    question: str = ""
    """The question the arms answer, as a sentence."""
    hypothesis: str = ""
    """What is expected, written before the runs."""
    variable: str | list[str] = ""
    """Full key that the arms differ in (its companions may follow), or a list of keys for a factorial or ladder."""
    baseline: str = ""
    """Arm that the others are compared with."""
    references: list[str] = key(factory=list)
    """Arms that are drawn but never ranked."""
    expected: Literal["loss-changing", "loss-neutral"] = "loss-changing"
    """loss-neutral: a loss outside the noise band is reported as a violated expectation."""
    seeds: list[int] = key(factory=list)
    """Values of debug.seed, the same for every arm."""
    aa: bool = False
    """Run the baseline again, on disjoint seeds and on the same ones, to measure the noise bands."""
    runs_on: dict[str, Any] = key(factory=dict)
    """Machines the question is meant for, as in { gpus = [2, 8] }; refused elsewhere unless asked for."""
    n1_ok: bool = False
    """Allow a single seed; every figure is then marked n = 1."""
    design: Literal["", "factorial", "ladder"] = ""
    """factorial: every combination of the arms is an arm. ladder: each arm adds one change to the last."""
    tune: dict[str, list[Any]] = key(factory=dict)
    """Full key -> grid of values tried for every arm; arms are compared best to best."""
    hold: dict[str, str] = key(factory=dict)
    """Full key -> derived quantity that the key keeps equal in every arm while the variable moves, as in
    { "training.global_batch_size" = "tokens_per_step" } under training.seq_len; only such keys may follow."""
    decide: Decide = field(default_factory=Decide)
