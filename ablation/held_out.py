"""Results of held-out tasks, as evaluate.py leaves them: ``<run_dir>/evaluations/<task>-step<n>.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from config.errors import ConfigError

PREFIX = "eval/"

Series = list[tuple[int, float]]


def read_evaluations(run_dir: Path) -> dict[str, Series]:
    """(step, value) under "eval/<task>/<metric>", in order of steps. Trials on a few documents are left out.

    Raises:
        ConfigError: a file is no result.
    """
    found: dict[str, dict[int, float]] = {}
    for path in sorted((run_dir / "evaluations").glob("*-step*.json")):
        try:
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if result["limit"] is not None:
                continue
            for name, measured in result["metrics"].items():
                found.setdefault(f"{PREFIX}{result['task']}/{name}", {})[int(result["step"])] = float(measured["value"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: no result of evaluate.py ({error}); restore the file or remove it") from None
    return {tag: sorted(values.items()) for tag, values in sorted(found.items())}
