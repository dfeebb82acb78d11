"""Where the time of a step goes: each moment of a profiled window belongs to exactly one part.

On a GPU, by what the device does: *exposed communication* while communication runs and nothing else does; otherwise the
part of the step that launched what runs; *data wait* while it is idle and the host waits for a batch; otherwise *idle*.
Without a GPU, by where the main thread is: *exposed communication* while a collective of gloo runs and the main thread
executes no operator; otherwise the part that it is in; otherwise *idle*.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.intervals import Interval, common, length, union, without
from trainer.spans import DATA
from trainer.trace import COMMUNICATION, OTHER, OVERHEAD, PHASES, Window

EXPOSED, DATA_WAIT, IDLE = "exposed_communication", "data_wait", "idle"
PARTS = (*PHASES, EXPOSED, DATA_WAIT, IDLE)

_MEANING = {
    "cuda": {
        "forward": "the device works on what the forward passes launched",
        "backward": "the same of the backward passes, recomputation included",
        "optimizer": "the same of gradient norm, clipping and update",
        OTHER: "the same of all else: copies of batches, validation, logging",
        EXPOSED: "communication runs and no other work does; waiting for other ranks is inside",
        DATA_WAIT: "the device is idle, the host waits for a batch",
        IDLE: "the device is idle for other reasons: launches come too late",
    },
    "cpu": {
        "forward": "the main thread is in a forward pass",
        "backward": "the main thread is in a backward pass, recomputation included",
        "optimizer": "the main thread is in gradient norm, clipping or update",
        OTHER: "the main thread is in validation or a checkpoint",
        EXPOSED: "gloo has messages under way and the main thread executes no operator",
        DATA_WAIT: "the main thread waits for a batch",
        IDLE: "the main thread is between parts",
    },
}


@dataclass(frozen=True)
class TimeSplit:
    """Seconds a step, the mean over ``steps`` profiled steps."""

    device: str
    steps: int
    seconds: dict[str, float]
    """Part (``PARTS``) -> seconds. They sum to ``step_s``."""
    step_s: float
    communication_s: float
    """Seconds in which any communication runs, hidden behind other work or not."""

    def tags(self) -> dict[str, float]:
        """Tag -> value, for metrics.jsonl and TensorBoard."""
        return {
            "profiling/step(s)": self.step_s,
            **{f"profiling/{part}(s)": self.seconds[part] for part in PARTS},
            "comm/exposed(%)": 100 * self.seconds[EXPOSED] / self.step_s,
            "comm/total(%)": 100 * self.communication_s / self.step_s,
        }

    def record(self) -> dict[str, object]:
        """The content of time_split.json."""
        return {
            "device": self.device,
            "steps": self.steps,
            "step_s": self.step_s,
            "parts_s": self.seconds,
            "communication_s": self.communication_s,
            "meaning": _MEANING[self.device],
        }

    def render(self) -> str:
        """The same to read."""
        lines = [f"{self.step_s * 1e3:.2f} ms a step, mean of {self.steps} profiled steps on {self.device}", ""]
        for part in PARTS:
            seconds = self.seconds[part]
            words = part.replace("_", " ")
            share = 100 * seconds / self.step_s
            lines.append(f"{words:<22}{seconds * 1e3:>10.2f} ms {share:>5.1f} %   {_MEANING[self.device][part]}")
        hidden = self.communication_s - self.seconds[EXPOSED]
        lines.append("")
        lines.append(
            f"communication in all {self.communication_s * 1e3:.2f} ms a step,"
            f" of which {hidden * 1e3:.2f} ms behind other work"
        )
        return "\n".join(lines) + "\n"


def split(window: Window, steps: int) -> TimeSplit:
    """How the time of ``window``, which holds ``steps`` steps, is divided."""
    whole = [window.span]

    def during(intervals: list[Interval]) -> list[Interval]:
        return common(union(intervals), whole)

    communication = during([(a.begin, a.end) for a in window.activities if a.kind == COMMUNICATION])
    working = [a for a in window.activities if a.kind not in (COMMUNICATION, OVERHEAD)]
    work = {phase: [a for a in working if a.phase == phase] for phase in PHASES}
    busy = during([(a.begin, a.end) for phase in PHASES for a in work[phase]])
    exposed = without(communication, busy)
    if window.device == "cuda":
        claims = {phase: during([(a.begin, a.end) for a in work[phase]]) for phase in PHASES}
    else:
        claims = {phase: during(window.ranges.get(phase, [])) for phase in PHASES}
    claims[DATA_WAIT] = during(window.ranges.get(DATA, []))

    seconds = {EXPOSED: length(exposed)}
    taken = exposed
    for part, moments in claims.items():  # a moment that two streams work in is the first part's
        seconds[part] = length(without(moments, taken))
        taken = union([*taken, *moments])
    seconds[IDLE] = length(without(whole, taken))
    scale = 1e-6 / steps
    return TimeSplit(
        device=window.device,
        steps=steps,
        seconds={part: seconds[part] * scale for part in PARTS},
        step_s=length(whole) * scale,
        communication_s=length(communication) * scale,
    )
