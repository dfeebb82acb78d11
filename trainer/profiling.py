"""Profiled windows of steps, and what each leaves in the run directory.

    <save_traces_folder>/iteration_<last step>/
        rank<r>_trace.json.gz       for ui.perfetto.dev
        rank<r>_kernels.txt .json   trainer/kernel_table.py
        rank<r>_time_split.txt .json    trainer/time_split.py

A window waits for the device at both its ends, so that it holds the work of its steps and of no others. Steps that are
recorded, and the warm-up before them, say nothing about throughput.
"""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, _KinetoProfile

from config.profiling_schema import Profiling
from trainer.kernel_table import tabulate
from trainer.memory_snapshot import record_allocations, write_snapshot
from trainer.spans import WINDOW, span
from trainer.time_split import TimeSplit, split
from trainer.trace import read_window

Gather = Callable[[dict[str, float]], list[dict[str, float]]]
"""A collective: this rank's tags -> those of all ranks."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Schedule:
    """Which steps are recorded: of every ``freq`` the last ``active``, after ``warmup`` to get ready.

    A window that would end after ``steps``, the run's last, is not begun.
    """

    freq: int
    warmup: int
    active: int
    steps: int

    def at(self, step: int) -> Literal["off", "warm-up", "active"]:
        """What the profiler does in step ``step``, the first of a run being 1."""
        left = -step % self.freq  # steps until the window's last
        if step + left > self.steps or left >= self.active + self.warmup:
            return "off"
        return "active" if left < self.active else "warm-up"

    def ends(self, step: int) -> bool:
        """Whether a period's last step is ``step``."""
        return step % self.freq == 0


class Profiler:
    """Records the windows that ``section`` asks for. Made on every rank; all of them call each method alike.

    Args:
        steps: of the run.
        gather: brings the tags of all ranks to each.
    """

    def __init__(self, section: Profiling, *, steps: int, rank: int, device: torch.device, gather: Gather):
        self._device, self._rank, self._gather = device, rank, gather
        self._schedule = Schedule(section.profile_freq, section.profiler_warmup, section.profiler_active, steps)
        self._section = section
        self._mine = not section.ranks or rank in section.ranks
        self._remembers = section.enable_memory_snapshot and self._mine
        self._folder = Path()
        self._snapshots: Path | None = None
        self._kineto: _KinetoProfile | None = None
        self._window: span | None = None
        self._recorded = 0
        self.step = 0
        """The step under way, 0 before the first."""

    def open(self, run_dir: Path) -> None:
        """Begin to record allocations, if that is on, before the first is made. Nothing is written yet."""
        self._folder = run_dir / self._section.save_traces_folder
        self._snapshots = run_dir / self._section.save_memory_snapshot_folder
        if self._remembers:
            record_allocations()

    def begin(self, step: int) -> str:
        """Get ready, or begin to record, if ``step`` asks for it. Call before the step's batch is taken.

        Returns:
            Why the time of this step says nothing about throughput, or nothing. The same on every rank.
        """
        self.step = step
        state = self._schedule.at(step) if self._section.enable_profiling else "off"
        if state != "off" and self._mine:
            self._record(active=state == "active")
        if self._section.enable_memory_snapshot:
            return "memory history"
        return "" if state == "off" else "profiling"

    def _record(self, *, active: bool) -> None:
        if self._kineto is None:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._kineto = _KinetoProfile(activities=activities)  # what torch.profiler.profile calls by a schedule
            self._kineto.prepare_trace()
        if active:
            if self._window is None:
                self._wait()
                self._kineto.start_trace()
                self._window, self._recorded = span(WINDOW), 0
                self._window.__enter__()
            self._recorded += 1

    def ends(self, step: int) -> bool:
        """Whether there is something to write after ``step``. The same on every rank."""
        section = self._section
        return self._schedule.ends(step) and (section.enable_profiling or section.enable_memory_snapshot)

    def end(self, step: int) -> dict[str, float]:
        """Write what the window that ends with ``step`` recorded. A collective; ``ends(step)`` must hold.

        Returns:
            Tags of the split of a step's time, the mean over the ranks that recorded.
        """
        if self._remembers and self._snapshots is not None:
            write_snapshot(self._snapshots / f"iteration_{step}", self._rank)
        tags = self._close(self._folder / f"iteration_{step}")
        recorded = [found for found in self._gather(tags) if found]
        return {tag: sum(found[tag] for found in recorded) / len(recorded) for tag in recorded[0]} if recorded else {}

    def last_snapshot(self) -> str:
        """Write a memory snapshot when this rank's GPU is out of memory, recorded or not; returns words that say where.

        Without a history it tells what is allocated, block by block, and what lies between. Off a GPU there is none.
        """
        if self._device.type != "cuda" or self._snapshots is None:
            return ""
        try:
            return f". Memory snapshot: {write_snapshot(self._snapshots / f'iteration_{self.step}_exit', self._rank)}"
        except OSError as error:  # the reason why training ended is more
            return f". No memory snapshot: {error}"

    def close(self) -> None:
        """Give up a window that is under way. A process that ends inside one is torn down by a signal."""
        if self._kineto is None:
            return
        if self._window is None:  # it was getting ready, and can only stop after it has begun
            self._kineto.start_trace()
        self._kineto.stop_trace()
        self._kineto = self._window = None

    def _close(self, folder: Path) -> dict[str, float]:
        kineto, window = self._kineto, self._window
        if kineto is None or window is None:
            return {}
        self._wait()
        window.__exit__(None, None, None)
        kineto.stop_trace()
        self._kineto = self._window = None
        begin = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        found = self._write(kineto, folder)
        seconds = time.perf_counter() - begin
        logger.info("Profile of %d steps in %s (written in %.1f s)", self._recorded, folder, seconds)
        return {} if found is None else found.tags()

    def _write(self, kineto: _KinetoProfile, folder: Path) -> TimeSplit | None:
        trace = folder / f"rank{self._rank}_trace.json"
        kineto.export_chrome_trace(str(trace))
        with open(trace, "rb") as plain, gzip.open(f"{trace}.gz", "wb", compresslevel=5) as packed:
            shutil.copyfileobj(plain, packed)
        try:
            window = read_window(json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"])
        except ValueError as error:  # training goes on: the trace itself is there
            logger.warning("%s.gz cannot be read, so it gives no table and no split: %s", trace, error)
            return None
        finally:
            trace.unlink()
        table, parts = tabulate(window, self._recorded), split(window, self._recorded)
        for name, found in (("kernels", table), ("time_split", parts)):
            (folder / f"rank{self._rank}_{name}.txt").write_text(found.render(), encoding="utf-8")
            record: dict[str, Any] = {"rank": self._rank, **found.record()}
            (folder / f"rank{self._rank}_{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return parts

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
