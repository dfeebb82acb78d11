"""The files of a run directory as plain values; runs.py says what they mean."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from config.errors import ConfigError


def flatten(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested TOML tables as full key -> value. Lists of tables are values."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    Raises:
        ConfigError: it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); restore the file or leave this run out") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: an object was expected; restore the file or leave this run out")
    return value


def _metric_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of one file; a torn last line is a kill: dropped."""
    lines = []
    texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            lines.append(line | {"step": int(line["step"])})
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            if number < len(texts):
                raise ConfigError(
                    f"{path}, line {number}: not a metrics object ({error}); leave this run out"
                ) from None
    return lines


def merged_lines(path: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Lines of a run by step, over all attempts: where it continued from a checkpoint, what came before lies in
    attempts/.

    A later attempt replaces everything from its own first step on.

    Raises:
        ConfigError: a line in the middle of a file is broken.
    """
    attempts = sorted((path / "attempts").glob("[0-9]*"), key=lambda folder: int(folder.name))
    merged: dict[int, dict[str, Any]] = {}
    for folder in (*attempts, path):
        lines = _metric_lines(folder / name)
        first = min((line["step"] for line in lines), default=math.inf)
        merged = {step: line for step, line in merged.items() if step < first} | {line["step"]: line for line in lines}
    return [merged[step] for step in sorted(merged)]


def left_nothing(paths: Iterable[Path]) -> list[Path]:
    """Logs of the runner in these directories whose run ended before it had a run directory: it is in no comparison,
    and for an arm whose every run ended so nothing else would tell that there was one.
    """
    logs = {log.resolve(): log for path in paths for log in sorted(path.glob("**/seed*-*gpu*.log"))}
    return [log for log in logs.values() if not (log.with_suffix("") / "run.json").exists()]
