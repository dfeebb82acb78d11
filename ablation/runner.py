"""Execute a plan: skip what is done, continue what was interrupted, go on past what fails, say so at the end.

What has happened is read from the run directories alone (DONE, FAILED, run.json), so a runner that was killed and
started again makes the same set of runs, none twice and none lost. train.py itself moves an interrupted attempt aside.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from ablation import child, lock
from ablation.plan import Plan, Run, check_folder

Say = Callable[[str], None]
INTERRUPTED = "interrupted"  # the reason train.py writes into FAILED when a signal ended it


def state_of(directory: Path) -> str:
    """ "done", "failed", "interrupted" (stopped, killed, or running), or "new"."""
    if (directory / "DONE").exists():
        return "done"
    if (directory / "FAILED").exists():
        return "interrupted" if _json(directory / "FAILED").get("reason") == INTERRUPTED else "failed"
    return "interrupted" if (directory / "run.json").exists() else "new"


@dataclass
class Tally:
    """What this runner did."""

    resumed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def eta_seconds(self, to_go: list[Run]) -> float | None:
        """Expected time of the runs to go: its arm's mean if that has run, else that of all. None before any has."""
        known = [s for seconds in self.seconds.values() for s in seconds]
        return sum(fmean(self.seconds.get(run.arm) or known) for run in to_go) if known else None


def execute(chosen: Plan, folder: Path, runs: list[Run], *, alone: bool = True, say: Say = print) -> int:
    """Run what is not done of ``runs`` (some of the plan's), in order.

    Args:
        alone: refuse another runner in the folder. False for the tasks of a job array, which only exclude each other
            from the same run.

    Returns:
        0, or 1 if a run failed, or 130 if stopped.

    Raises:
        ConfigError: another runner is at work, or the folder holds runs of another version of the question.
    """
    with ExitStack() as stack:
        held = [stack.enter_context(lock.acquire(folder / ".runner.lock", shared=not alone, say=say))]
        check_folder(chosen, folder)
        if not alone:
            for run in runs:
                held.append(stack.enter_context(lock.acquire(folder / f"{run.place}.lock", say=say)))
        stack.enter_context(child.stoppable())
        tally = Tally()
        for run in chosen.runs:
            if (seconds := _duration(folder / run.place)) is not None:
                tally.seconds.setdefault(run.arm, []).append(seconds)
        to_go = [run for run in runs if state_of(folder / run.place) != "done"]
        say(f"{folder}: {len(runs) - len(to_go)} of {len(runs)} runs done, {len(to_go)} to go")
        try:
            for position, run in enumerate(to_go):
                _one(chosen, folder, run, to_go[position:], tally, [h.fd for h in held], say)
        except child.Stopped as signal:
            done = sum(state_of(folder / run.place) == "done" for run in runs)
            say(f"stopped by {signal}: {done} of {len(runs)} runs done; the same command continues")
            return 130
    done = sum(state_of(folder / run.place) == "done" for run in runs)
    say(f"{folder}: {done} of {len(runs)} runs done" + (f", {len(tally.failures)} failed:" if tally.failures else ""))
    for name, reason in tally.failures.items():
        say(f"  {name}: {reason}")
    return 1 if tally.failures else 0


def _one(chosen: Plan, folder: Path, run: Run, to_go: list[Run], tally: Tally, fds: list[int], say: Say) -> None:
    directory = folder / run.place
    log = directory.with_name(f"{directory.name}.log")
    tally.resumed += state_of(directory) == "interrupted"
    eta = tally.eta_seconds(to_go)
    words = [f"run {run.index} of {len(chosen.runs)}"]
    words += [f"{tally.resumed} resumed"] if tally.resumed else []
    words += [f"{len(tally.failures)} failed"] if tally.failures else []
    words += [f"ETA {clock(eta)}"] if eta is not None else []
    say(f"{', '.join(words)}: {run}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    status = child.run(chosen.command(run, folder), log, fds)
    seconds = time.monotonic() - started
    if status == 0 and state_of(directory) == "done":
        tally.seconds.setdefault(run.arm, []).append(seconds)
        say(f"  done in {clock(seconds)}{_result(directory)}")
        return
    reason = _reason(directory, status)
    tally.failures[str(run)] = f"{reason} ({log})"
    say(f"  FAILED after {clock(seconds)}: {reason}")
    for line in child.last_lines(log, 5):
        say(f"  | {line}")


def dry_run(chosen: Plan, folder: Path, runs: list[Run], say: Say = print) -> None:
    """List runs, their states and commands. Touches nothing."""
    for run in runs:
        say(f"{run.index:>4} of {len(chosen.runs)}  {state_of(folder / run.place):<12} {run}")
        say(f"      {shlex.join(chosen.command(run, folder))}")


def clock(seconds: float) -> str:
    """``750`` as "12:30", ``4000`` as "1:06:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _duration(directory: Path) -> float | None:
    """Seconds a finished run took; None for any other."""
    try:
        started = datetime.fromisoformat(_json(directory / "run.json")["started"])
        finished = datetime.fromisoformat(_json(directory / "DONE")["finished"])
        return (finished - started).total_seconds()
    except (KeyError, TypeError, ValueError):
        return None


def _reason(directory: Path, status: int) -> str:
    if status == 0:
        return "it ended without writing DONE"
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    said = _json(directory / "FAILED").get("reason")
    return f"{said} ({how})" if said else how


def _result(directory: Path) -> str:
    """The last loss and throughput of a run, for the eye."""
    latest: dict[str, Any] = {}
    try:
        for line in (directory / "metrics.jsonl").read_text().splitlines():
            latest.update(json.loads(line))
    except (OSError, ValueError):
        return ""
    text = ""
    if isinstance(loss := latest.get("validation_metrics/loss"), int | float):
        text += f", validation loss {loss:.4f}"
    if isinstance(speed := latest.get("throughput(tps)"), int | float):
        text += f", {speed:,.0f} tokens/s a device"
    return text
