"""What every side of a comparison has in common: a job, a setting, a process that is run to its end, a missing peer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.workloads import Workload
from config.errors import ConfigError
from config.schema import Config
from config.shapes import ModelShape

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 5
"""Steps over which a rate is formed. torchtitan prints rates at log steps only and waits for the device there, so a log
step each step would slow it; the other sides' step times are averaged over equal windows."""


@dataclass(frozen=True)
class Setting:
    """How one side runs: sequences of a micro-batch, and words that the side knows."""

    batch: int
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "+".join([str(self.batch), *self.words])


@dataclass(frozen=True)
class Job:
    """What all sides are asked to do, and what they read."""

    workload: Workload
    config: Config
    """Of ``workload.config``."""
    shape: ModelShape
    ngpu: int
    """Ranks; on a machine without GPUs they are CPU processes."""
    device: str
    """ "cuda" or "cpu"."""
    steps: int
    work: Path
    """A temporary folder."""
    limit_s: float
    """A run that takes longer is stopped."""
    ours_options: tuple[str, ...] = ()
    """Further words of our command line."""

    @property
    def tokens_per_step(self) -> int:
        """Of one GPU."""
        return self.workload.sequences * self.config.training.seq_len

    def accumulation(self, setting: Setting) -> int:
        """Micro-batches of an optimizer step."""
        return self.workload.sequences // setting.batch


class Side(Protocol):
    """Ours or a peer."""

    name: str
    words: dict[str, tuple[str, ...]]
    """Word of a setting -> what it adds to the command line or the specification."""

    def missing(self) -> str | None:
        """Why it cannot run here, with the remedy; None if it can."""

    def title(self) -> str:
        """Name and version."""

    def notes(self, job: Job) -> list[str]:
        """In what it differs from the other sides."""

    def run(self, job: Job, setting: Setting) -> dict[str, Any]:
        """One run of ``job.steps`` steps.

        Returns:
            JSON values: ``command``, ``step_times_s`` (seconds of every step, or None) or ``window_tokens_per_s``
            (tokens/s a GPU in each window of WINDOW steps after the workload's warm-up), ``losses`` (step -> nats),
            ``reserved_gib`` (peak on the first rank), ``log_tail``.

        Raises:
            RunFailed: it did not end well.
        """


class RunFailed(Exception):
    """A run that did not end well: ``reason`` in a line, and the end of what it printed."""

    def __init__(self, reason: str, command: list[str], log: str):
        super().__init__(reason)
        self.reason, self.command, self.log_tail = reason, shown(command), log[-3000:]


class TooSlow(RunFailed):
    """A run that was stopped at ``Job.limit_s``."""


def parse_settings(text: str, side: Side, workload: Workload) -> list[Setting]:
    """The settings of a comma-separated list.

    Raises:
        ConfigError: a word that the side does not know, or a batch that does not divide the step's sequences.
    """
    found = []
    for item in text.split(","):
        batch, *words = item.strip().split("+")
        where = f"--{side.name}_settings {text}: {item.strip()!r}"
        if not batch.isdigit() or not int(batch) or workload.sequences % int(batch):
            raise ConfigError(
                f"{where}: a setting begins with a micro-batch, which divides the {workload.sequences} sequences "
                f"a GPU of a step of {workload.name}"
            )
        unknown = [word for word in words if word not in side.words]
        if unknown:
            known = ", ".join(side.words) or "none"
            raise ConfigError(f"{where}: {side.name} knows no {unknown[0]!r}; words: {known}")
        found.append(Setting(int(batch), tuple(words)))
    return found


def torchrun(ngpu: int) -> list[str]:
    """The launcher every side uses."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ngpu}"]


def execute(command: list[str], folder: Path, limit_s: float, python_path: str = "") -> str:
    """Run ``command`` in ``folder`` and return what it printed.

    All its processes end when it does, when the time is up, or when this process is interrupted.

    Args:
        python_path: folder that imports look at first.

    Raises:
        RunFailed: another exit code than 0, or the time is up.
    """
    environment = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ}
    if python_path:
        environment["PYTHONPATH"] = os.pathsep.join([python_path, *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        raise TooSlow(f"stopped after {limit_s:.0f} s", command, process.communicate()[0]) from None
    except BaseException:
        _end(process)
        raise
    if process.returncode:
        raise RunFailed(reason_of(process.returncode, log), command, log)
    return log


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the launcher and the ranks, which are in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def reason_of(exit_code: int, log: str) -> str:
    """A line on why a process ended with ``exit_code``: the last error it printed."""
    if re.search(r"OutOfMemoryError|CUDA out of memory|Stopped after step \d+: out of memory", log):
        return "out of memory"
    errors = re.findall(
        r"^(?:\[rank\d+\]:)?\s*((?:\w+\.)*\w+(?:Error|Exception)\b.*)$", without_colours(log), re.MULTILINE
    )
    errors = [e for e in errors if "ChildFailedError" not in e]
    if exit_code == 2 and not errors:  # a mistake in the configuration is a sentence without a type
        errors = log.strip().splitlines()[-1:]
    return f"exit code {exit_code}" + (f": {errors[-1].strip()[:200]}" if errors else "")


def without_colours(log: str) -> str:
    """``log`` without the codes that colour a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log)


def shown(command: list[str]) -> list[str]:
    """A command as it reads in the checkout's folder."""
    return ["python" if word == sys.executable else word.replace(f"{ROOT}{os.sep}", "") for word in command]
