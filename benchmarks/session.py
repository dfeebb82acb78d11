"""Runs the sides of one workload in turn, and keeps every finished run.

With peers B and C the order is B A C C A B, A being ours: each peer's runs stand beside ours as BAAB or ACCA, so a
drift of the machine that is linear in time cancels in every ratio, and ours are run once for all peers.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.rows import lacks, rates, save_raw
from benchmarks.side import WINDOW, Job, RunFailed, Setting, Side, TooSlow
from benchmarks.workloads import WARM_UP

TRY_STEPS = WARM_UP + WINDOW
"""Steps of a run that only chooses between settings."""


@dataclass
class Row:
    """A peer's raw file while it is measured."""

    peer: str
    path: Path
    raw: dict[str, Any]


class OutOfTime(Exception):
    """The budget does not hold another run."""


@dataclass
class Session:
    """The unfinished rows of one workload.

    Args:
        sides: ours and the peers of the rows, by name.
        candidates: side -> settings to try, from the left.
        best: try each of several settings for TRY_STEPS steps and keep the fastest, instead of the first that runs.
        runs: of each side.
        deadline: ``time.monotonic()`` at which everything ends.
    """

    job: Job
    sides: dict[str, Side]
    rows: list[Row]
    candidates: dict[str, list[Setting]]
    best: bool = False
    runs: int = 2
    deadline: float = float("inf")
    say: Callable[[str], None] = print
    _longest: dict[str, float] = field(default_factory=dict)

    def order(self) -> list[str]:
        """Names of the sides, run by run."""
        first, *others = [row.peer for row in self.rows]
        half = [first, "ours", *others]
        return half + half[::-1] if self.runs == 2 else half

    def measure(self) -> None:
        """Fill the rows. What a file already holds is not run again.

        Raises:
            OutOfTime: there was no time for all of it; the rows hold what there was time for.
        """
        place: dict[str, int] = {}
        for name in self.order():
            place[name] = place.get(name, 0) + 1
            lacking = [row for row in self._rows_of(name) if lacks(row.raw, name, place[name])]
            if not lacking:
                continue
            self._prefer_measured(name)
            if self.best and len(self.candidates[name]) > 1:
                self._choose(name)
            run = self._run(name)
            for row in lacking:
                row.raw["runs"].append(run)
                save_raw(row.path, row.raw)

    def _rows_of(self, side: str) -> list[Row]:
        return [row for row in self.rows if side in ("ours", row.peer)]

    def _prefer_measured(self, name: str) -> None:
        """Go on with the setting of earlier runs."""
        for row in self._rows_of(name):
            for run in row.raw["runs"]:
                if run["side"] == name and "error" not in run:
                    self.candidates[name] = [s for s in self.candidates[name] if str(s) == run["setting"]]

    def _choose(self, name: str) -> None:
        """Leave the fastest setting; every one that was tried is recorded. All failed: leave them to fail again."""
        speeds: dict[Setting, float] = {}
        for setting in self.candidates[name]:
            job = dataclasses.replace(self.job, steps=TRY_STEPS)
            try:
                speed = statistics.median(rates(self._once(name, setting, job), job.tokens_per_step))
            except RunFailed as error:
                self._record(name, setting, error.reason, error)
                continue
            speeds[setting] = speed
            self._record(name, setting, f"{speed:,.0f} tokens/s a GPU over {WINDOW} steps", tokens_per_s=speed)
        if speeds:
            self.candidates[name] = [max(speeds, key=lambda setting: speeds[setting])]

    def _run(self, name: str) -> dict[str, Any]:
        """A run with the first of the settings that works; those that do not are not tried again."""
        for setting in list(self.candidates[name]):
            try:
                run = self._once(name, setting, self.job)
            except RunFailed as error:
                self.candidates[name].remove(setting)
                self._record(name, setting, error.reason, error)
                last = error
                continue
            speed = statistics.median(rates(run, self.job.tokens_per_step, self.job.workload.warm_up))
            loss = list(run["losses"].values())[-1]
            self.say(f"{name} {setting}: {speed:,.0f} tokens/s a GPU, loss {loss:.3f}, {run['seconds']:.0f} s")
            return run
        return {"side": name, "error": last.reason, "command": last.command, "log_tail": last.log_tail}

    def _once(self, name: str, setting: Setting, job: Job) -> dict[str, Any]:
        left, longest = self.deadline - time.monotonic(), max(self._longest.values(), default=0.0)
        if left < longest:
            raise OutOfTime(f"{left:.0f} s are left, the longest run took {longest:.0f} s")
        started, begun = datetime.now(UTC), time.monotonic()
        try:
            run = self.sides[name].run(dataclasses.replace(job, limit_s=min(job.limit_s, left)), setting)
        except TooSlow as error:
            if left < job.limit_s:
                raise OutOfTime(f"{name} {setting} did not end in the {left:.0f} s that were left") from error
            raise
        self._longest[name] = time.monotonic() - begun
        seconds = round(self._longest[name], 1)
        return {
            "side": name, "setting": str(setting), "started": started.isoformat(timespec="seconds"),
            "seconds": seconds, **run,
        }  # fmt: skip

    def _record(
        self, name: str, setting: Setting, outcome: str, error: RunFailed | None = None, **figures: float
    ) -> None:
        self.say(f"{name} {setting}: {outcome}")
        entry: dict[str, Any] = {"side": name, "setting": str(setting), "outcome": outcome, **figures}
        if error is not None:
            entry |= {"command": error.command, "log_tail": error.log_tail}
        for row in self._rows_of(name):
            row.raw["tries"].append(entry)
            save_raw(row.path, row.raw)
