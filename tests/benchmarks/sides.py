"""Jobs and sides that measure nothing: what a session does with a side's answers is the question."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.compare import job_of, parser
from benchmarks.side import Job, RunFailed, Setting
from benchmarks.workloads import WORKLOADS

Answer = Callable[[Setting, Job], float]
"""Seconds a step takes under a setting, or a RunFailed that it raises."""


def debug_job(tmp_path: Path, workload: str = "debug", *options: str) -> Job:
    return job_of(WORKLOADS[workload], parser().parse_args([workload, *options]), "cpu", tmp_path)


class Told:
    """A side that answers as it is told, and remembers what it was asked."""

    def __init__(self, name: str, answer: Answer, calls: list[str]):
        self.name, self._answer, self._calls = name, answer, calls
        self.words: dict[str, tuple[str, ...]] = {"full": ()}

    def missing(self) -> str | None:
        return None

    def title(self) -> str:
        return f"{self.name} 1.0"

    def notes(self, job: Job) -> list[str]:
        return []

    def run(self, job: Job, setting: Setting) -> dict[str, Any]:
        self._calls.append(f"{self.name} {setting}" + (f" for {job.steps}" if job.steps != 25 else ""))
        seconds = self._answer(setting, job)
        return {
            "command": [self.name],
            "step_times_s": [seconds] * job.steps,
            "losses": {job.steps: 2.0},
            "reserved_gib": 1.0 * setting.batch,
            "log_tail": "",
        }


def out_of_memory(*settings: str, otherwise: float = 1.0) -> Answer:
    """Fails under these settings."""

    def answer(setting: Setting, job: Job) -> float:
        if str(setting) in settings:
            raise RunFailed("out of memory", ["side"], "CUDA out of memory")
        return otherwise

    return answer


def raw_file(runs: list[dict[str, Any]], **identity: Any) -> dict[str, Any]:
    """A raw file of dense_1b beside torchtitan with these runs."""
    return {
        "schema": 1,
        "identity": {
            "workload": "dense_1b", "peer": "torchtitan", "ngpu": 1, "gpu": "NVIDIA H200", "torch": "2.11.0",
            "commit": "abc", "steps": 25, **identity,
        },
        "title": "torchtitan 0.2.2",
        "flops_per_token": 9_000_000_000,
        "tokens_per_step": 1000,
        "notes": [],
        "tries": [],
        "runs": runs,
    }  # fmt: skip


def run_of(side: str, step_times_s: list[float], **more: Any) -> dict[str, Any]:
    return {
        "side": side,
        "setting": "4",
        "step_times_s": step_times_s,
        "losses": {"25": 3.0},
        "reserved_gib": 2.0,
    } | more
