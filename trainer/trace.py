"""What a device did in a profiled window, read from the events of a Chrome trace as torch.profiler writes them.

On a GPU an activity is a kernel, a copy or a fill on the device, and it belongs to the part of the step during which
the host launched it: the main thread waits while the backward thread launches. Without a GPU the host is the device,
and an activity is an operator of the main thread or a collective of gloo.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer.intervals import Interval, union
from trainer.spans import BACKWARD, DATA, FORWARD, OPTIMIZER, PREFIX, WINDOW

OTHER = "other"
"""Part of a step that is none of forward, backward, optimizer: copies of batches, validation, logging."""
PHASES = (FORWARD, BACKWARD, OPTIMIZER, OTHER)

GEMM, ATTENTION, COMMUNICATION, COPY, ELEMENTWISE = "GEMM", "attention", "communication", "memory copy", "elementwise"
OVERHEAD = "overhead"
KINDS = (GEMM, ATTENTION, COMMUNICATION, COPY, OPTIMIZER, ELEMENTWISE, OVERHEAD)
"""Kinds of work, as far as a name tells. elementwise holds what is none of the others: norms, reductions, indexing.
overhead is on a CPU alone: the own time of what autograd wraps around operators, in which hooks may wait for messages.
"""

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("cuda_runtime", "cuda_driver")
# Tried in this order. Names are those of NCCL, cuBLAS (nvjet), CUTLASS, cuDNN, flash-attn, inductor, Triton and ATen.
_NAMES = (
    (COMMUNICATION, r"nccl|^gloo:|c10d|nvshmem|deep_ep|multimem|symm_mem|Memcpy PtoP"),
    (ATTENTION, r"flash|fmha|attention|sdpa"),
    (GEMM, r"gemm|gemv|nvjet|cublas|xmma|splitk|grouped_mm|triton_tem_.*mm|cutlass(?!.*(norm|softmax|entropy))"),
    (GEMM, r"aten::(mm|addmm|bmm|baddbmm|addbmm|addmv|mv|dot|_scaled_mm|linear)$|mkldnn_linear"),
    (COPY, r"^(?!triton_).*(memcpy|memset|copy|CatArray|chunk_cat|split_with_sizes)|aten::(cat|clone|contiguous|to)$"),
    (OPTIMIZER, r"adam"),
)
_BOOKKEEPING = re.compile(r"^(autograd|torch::autograd)::|^(?!Compiled)\w+$")
_PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _NAMES]


@dataclass(frozen=True)
class Activity:
    """Something the device did. Times in microseconds."""

    name: str
    kind: str
    """One of ``KINDS``."""
    phase: str
    """One of ``PHASES``."""
    begin: float
    end: float
    own: float
    """Its time without that of the activities inside it; on a GPU there are none."""


@dataclass(frozen=True)
class Window:
    """A profiled window. Times in microseconds."""

    device: str
    """ "cuda" or "cpu"."""
    span: Interval
    ranges: dict[str, list[Interval]]
    """Part of the step -> when the host's main thread was in it."""
    activities: list[Activity]


def kind_of(name: str, phase: str = OTHER) -> str:
    """The kind of work that a kernel or operator called ``name`` does; the optimizer's own where ``phase`` is its."""
    kind = next((kind for kind, pattern in _PATTERNS if pattern.search(name)), ELEMENTWISE)
    return OPTIMIZER if kind == ELEMENTWISE and phase == OPTIMIZER else kind


def read_window(events: Iterable[dict[str, Any]]) -> Window:
    """The window in a trace's ``traceEvents``.

    Raises:
        ValueError: the trace has no range ``train/window``, so no window of this trainer was recorded in full.
    """
    complete = [e for e in events if e.get("ph") == "X" and "dur" in e]
    parts = [e for e in complete if e.get("cat") == "user_annotation" and e["name"].startswith(PREFIX)]
    windows = [e for e in parts if e["name"] == PREFIX + WINDOW]
    if not windows:
        raise ValueError(f"no range {PREFIX}{WINDOW} in the trace")
    ranges: dict[str, list[Interval]] = {}
    for e in parts:
        name = e["name"].removeprefix(PREFIX).partition(" ")[0]
        if name != WINDOW:
            ranges.setdefault(name if name in (*PHASES, DATA) else OTHER, []).append(_interval(e))
    phase_at = _Phases(ranges)
    on_device = [e for e in complete if e.get("cat") in _DEVICE]
    if on_device:
        activities = _kernels(on_device, [e for e in complete if e.get("cat") in _LAUNCH], phase_at)
    else:
        activities = _operators(complete, windows[0]["tid"], phase_at)
    return Window(
        device="cuda" if on_device else "cpu",
        span=_interval(windows[0]),
        ranges={name: union(intervals) for name, intervals in ranges.items()},
        activities=activities,
    )


class _Phases:
    """Part of the step that the main thread is in at a moment."""

    def __init__(self, ranges: dict[str, list[Interval]]):
        self._ranges = sorted((*i, name) for name in PHASES for i in ranges.get(name, []))
        self._begins = [begin for begin, _, _ in self._ranges]

    def at(self, moment: float) -> str:
        place = bisect_right(self._begins, moment) - 1
        return self._ranges[place][2] if place >= 0 and moment < self._ranges[place][1] else OTHER


def _kernels(on_device: list[dict[str, Any]], launches: list[dict[str, Any]], phases: _Phases) -> list[Activity]:
    launched = {e["args"]["correlation"]: e["ts"] for e in launches if "correlation" in e.get("args", {})}
    found = []
    for e in on_device:
        phase = phases.at(launched.get(e.get("args", {}).get("correlation"), float("-inf")))
        begin, end = _interval(e)
        found.append(Activity(e["name"], kind_of(e["name"], phase), phase, begin, end, end - begin))
    return found


def _operators(complete: list[dict[str, Any]], main: Any, phases: _Phases) -> list[Activity]:
    """Operators of the main thread with their own times, and gloo's collectives, which run on threads of theirs."""
    found: list[Activity] = []
    open_: list[Activity] = []
    inside: list[float] = []

    def close() -> None:
        whole, children = open_.pop(), inside.pop()
        found.append(Activity(**{**vars(whole), "own": max(0.0, whole.end - whole.begin - children)}))

    operators = [e for e in complete if e.get("cat") == "cpu_op" and e["tid"] == main]
    for e in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        begin, end = _interval(e)
        while open_ and open_[-1].end <= begin:
            close()
        if open_:
            inside[-1] += end - begin
        phase = phases.at(begin)
        kind = OVERHEAD if _BOOKKEEPING.search(e["name"]) else kind_of(e["name"], phase)
        open_.append(Activity(e["name"], kind, phase, begin, end, 0.0))
        inside.append(0.0)
    while open_:
        close()
    for e in complete:
        if e.get("cat") == "user_annotation" and e["name"].startswith("gloo:"):
            begin, end = _interval(e)
            found.append(Activity(e["name"], COMMUNICATION, phases.at(begin), begin, end, end - begin))
    return found


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])
