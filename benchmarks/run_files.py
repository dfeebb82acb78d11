"""What benchmarks read of a run directory."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def metrics_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of its metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def timed_steps(lines: Iterable[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """(step, seconds) of the steps up to these log lines that the run did not leave out."""
    for line in lines:
        seconds = line["step_times_s"]
        for step, time in enumerate(seconds, line["step"] - len(seconds) + 1):
            if step not in line["excluded_steps"]:
                yield step, time
