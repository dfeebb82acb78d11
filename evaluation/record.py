"""Results of tasks in a run directory: a file a task and step, and the same for TensorBoard.

    <run_dir>/evaluations/<task>-step<n>.json            the whole task
    <run_dir>/evaluations/<task>-step<n>-limit<k>.json   its first k documents: a trial, which no comparison reads
    <run_dir>/<metrics.save_tb_folder>/evaluations/      eval/<task>/<metric> at the step

A file is written once. What is there is never replaced.
"""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from config.errors import ConfigError

FOLDER = "evaluations"


def result_path(run_dir: Path, task: str, step: int, limit: int | None) -> Path:
    """Where the result of a task belongs. Characters that file names do not take become "_"."""
    name = re.sub(r"[^\w.,=+-]", "_", task)
    return run_dir / FOLDER / f"{name}-step{step}{'' if limit is None else f'-limit{limit}'}.json"


def check_free(run_dir: Path, tasks: list[str], step: int, limit: int | None) -> None:
    """ConfigError: some result is there already."""
    there = [path for task in tasks if (path := result_path(run_dir, task, step, limit)).exists()]
    if there:
        raise ConfigError(
            f"{', '.join(map(str, there))}: this was evaluated before, and no result is overwritten. Leave the task out"
            " of --tasks, or move the file away to evaluate again."
        )


def add_result(run_dir: Path, task: str, step: int, limit: int | None, result: dict[str, Any]) -> Path:
    """Write one result, and return its file.

    Raises:
        ConfigError: another process has written it meanwhile.
    """
    path = result_path(run_dir, task, step, limit)
    path.parent.mkdir(exist_ok=True)
    evaluated = datetime.now(UTC).isoformat(timespec="seconds")
    record = {"schema": 1, "task": task, "step": step, "limit": limit, "evaluated": evaluated, **result}
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)  # unlike a rename, fails if the name is taken
    except FileExistsError:
        check_free(run_dir, [task], step, limit)
    finally:
        temporary.unlink()
    return path


def add_to_tensorboard(folder: Path, task: str, step: int, metrics: dict[str, dict[str, Any]]) -> None:
    """Scalars of one result.

    Args:
        folder: of the run's events. They go to a folder inside: TensorBoard follows the newest file of a folder only,
            and the run may be writing another.
    """
    from tensorboard.summary import Writer

    writer = Writer(str(folder / FOLDER))
    for name, measured in metrics.items():
        writer.add_scalar(f"eval/{task}/{name}", measured["value"], step)
    writer.close()
