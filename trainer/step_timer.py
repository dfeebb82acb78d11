"""How long each step took, without waiting for the device until somebody asks.

A step lasts from the end of the one before it (or ``start``) to its own end, so that whatever slows training down is in
some step: waiting for data, logging, garbage collection. What is not training (validation, a checkpoint) is done inside
``paused``, and its time is in no step. On a GPU boundaries are events on its stream, read at ``collect`` alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

WARM_UP_STEPS = 3


@dataclass
class StepTimes:
    """Times of the steps since the last ``collect``, in order."""

    first_step: int
    """Number of the first of these steps; the first step of a run is 1."""
    seconds: list[float] = field(default_factory=list)
    excluded: dict[int, str] = field(default_factory=dict)
    """Step number -> why its time says nothing about throughput."""
    data_wait_s: float = 0.0
    """Seconds of all these steps spent waiting for data."""

    @property
    def counted(self) -> list[float]:
        """Seconds of the steps that are not excluded."""
        return [s for step, s in enumerate(self.seconds, self.first_step) if step not in self.excluded]


class StepTimer:
    """Times steps on ``device``.

    The first ``warm_up_steps`` after ``first_step`` are excluded: they compile, allocate and connect. ``first_step``
    is 1, or one more than the step that was resumed from.
    """

    def __init__(self, device: torch.device, *, first_step: int = 1, warm_up_steps: int = WARM_UP_STEPS):
        self._cuda = device.type == "cuda"
        self._step = first_step
        self._warm_until = first_step + warm_up_steps
        self._boundary: Any = None
        self._pauses: list[tuple[Any, Any]] = []
        self._steps: list[tuple[Any, Any, list[tuple[Any, Any]]]] = []
        self._excluded: dict[int, str] = {}
        self._data_wait = 0.0
        self._first_kept = first_step

    def start(self) -> None:
        """Begin the first step."""
        self._boundary, self._pauses = self._mark(), []

    def stop(self) -> None:
        """End the present step and begin the next."""
        if self._step < self._warm_until:
            self._excluded.setdefault(self._step, "warm-up")
        end = self._mark()
        self._steps.append((self._boundary, end, self._pauses))
        self._boundary, self._pauses = end, []
        self._step += 1

    def exclude(self, reason: str) -> None:
        """Leave the present step out of throughput: its time holds ``reason``."""
        self._excluded[self._step] = reason

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of this block out of the present step."""
        begin = self._mark()
        try:
            yield
        finally:
            self._pauses.append((begin, self._mark()))

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time of this block, which stays in the step, as waiting for data."""
        begin = time.perf_counter()
        yield
        self._data_wait += time.perf_counter() - begin

    def collect(self) -> StepTimes:
        """The steps ended since the last call. On a GPU waits for the last of them."""
        if self._cuda and self._steps:
            self._steps[-1][1].synchronize()
        times = StepTimes(self._first_kept, excluded=self._excluded, data_wait_s=self._data_wait)
        for begin, end, pauses in self._steps:
            times.seconds.append(self._between(begin, end) - sum(self._between(*pause) for pause in pauses))
        # An exclusion of the step that is under way belongs to the next collection.
        self._excluded = {step: reason for step, reason in times.excluded.items() if step >= self._step}
        times.excluded = {step: reason for step, reason in times.excluded.items() if step < self._step}
        self._steps, self._data_wait, self._first_kept = [], 0.0, self._step
        return times

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self._cuda else end - begin
