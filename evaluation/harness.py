"""lm-evaluation-harness (lm-eval) run on a Hugging Face folder, and the parts of its results file that are kept.

It runs in a process of its own, without the checkout on its path: it imports a package called ``evaluate``, and the
checkout has a file of that name.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.errors import ConfigError

NEEDED = ("lm_eval", "transformers", "accelerate")
"""What the harness and its hf backend import."""


class HarnessFailed(RuntimeError):
    """lm-eval ended with an error, which it has printed."""


def check_installed() -> None:
    """ConfigError: a package is missing, and the extra that brings it."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"Held-out tasks need lm-eval and its hf backend, and {', '.join(missing)} cannot be imported. Install the"
            ' optional extra: pip install -e ".[eval]"'
        )


def run_harness(
    model: Path,
    tasks: Sequence[str],
    *,
    dtype: str,
    device: str,
    batch_size: str,
    limit: int | None,
    include_path: Path | None,
) -> dict[str, Any]:
    """lm-eval's results file for ``tasks`` on the Hugging Face folder ``model``; its output goes to standard error.

    Args:
        dtype, device: of the model, in torch's words.
        batch_size: a number, or "auto".
        limit: documents of each task; None: all.
        include_path: folder with further tasks. Paths in them are taken from the present directory.

    Raises:
        ConfigError: there is no task of that name.
        HarnessFailed: it ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="lm-eval-") as out:
        command = [sys.executable, "-P", "-m", "lm_eval", "--model", "hf", "--tasks", ",".join(tasks)]
        command += ["--model_args", f"pretrained={model},dtype={dtype}", "--device", device]
        command += ["--batch_size", batch_size, "--output_path", out]
        command += [] if limit is None else ["--limit", str(limit)]
        command += [] if include_path is None else ["--include_path", str(include_path)]
        code, error = _run(command)
        if unknown := re.search(r"^\w+: Tasks (?:were )?not found: (.*)", error, re.MULTILINE):
            raise ConfigError(
                f"--tasks {','.join(tasks)}: lm-eval knows no {unknown[1].strip()}. Tasks of your own are found with"
                " --include_path DIR; `lm-eval ls tasks` lists the others."
            )
        found = list(Path(out).rglob("results_*.json"))
        if code or len(found) != 1:
            print(error, end="", file=sys.stderr)
            raise HarnessFailed(f"lm-eval ended with exit code {code} and {len(found)} results files; see above.")
        return json.loads(found[0].read_text(encoding="utf-8"))


def _run(command: list[str]) -> tuple[int, str]:
    """Exit code and, from its traceback on, what a command printed; what came before goes to standard error."""
    here = Path(__file__).resolve().parents[1]
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and Path(p).resolve() != here]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None
        error = b""
        while chunk := os.read(process.stdout.fileno(), 4096):  # lines of a progress bar have no end
            shown, mark, rest = (error + chunk).partition(b"Traceback (most recent call last)")
            error = mark + rest
            sys.stderr.write(shown.decode(errors="replace"))
            sys.stderr.flush()
    return process.returncode, error.decode(errors="replace")


def recorded_tasks(asked: Sequence[str], results: dict[str, Any]) -> list[str]:
    """The tasks and groups of a results file that get a record: those asked for, and what a tag stands for.

    A group holds its tasks; they get no record of their own unless they were asked for.
    """
    measured = {**results.get("groups", {}), **results.get("results", {})}
    below = {name for children in results.get("group_subtasks", {}).values() for name in children}
    return [name for name in measured if name in asked or name not in below]


def result_of(task: str, results: dict[str, Any]) -> dict[str, Any]:
    """What the results file says of one task or group of tasks.

    Returns:
        ``metrics``: name -> {"value", "stderr" (or None), "higher_is_better" (or None)}. A name is lm-eval's, with the
        filter after a comma where there is one ("exact_match,strict-match"). ``subtasks``: the same for each task of a
        group. ``samples``, ``fewshot``, ``version`` and ``settings`` (the task's configuration), as far as they are
        said.

    """
    measured = {**results.get("results", {}), **results.get("groups", {})}
    subtasks = _tasks_under(task, results.get("group_subtasks", {}))
    return {
        "metrics": _metrics(task, measured[task], results),
        "subtasks": {name: _metrics(name, measured[name], results) for name in subtasks if name in measured},
        "samples": results.get("n-samples", {}).get(task, {}).get("effective"),
        "fewshot": results.get("n-shot", {}).get(task),
        "version": results.get("versions", {}).get(task),
        "settings": _settings(results.get("configs", {}).get(task)),
    }


def _settings(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """A task's configuration without the model's folder, which is gone by the time it is read."""
    if config is None or "metadata" not in config:
        return config
    return config | {"metadata": {k: v for k, v in config["metadata"].items() if k != "pretrained"}}


def _tasks_under(group: str, children: dict[str, list[str]]) -> list[str]:
    """Every task and group below a group, in order."""
    below: list[str] = []
    for name in children.get(group, []):
        below += [name, *_tasks_under(name, children)]
    return below


def _metrics(task: str, entry: dict[str, Any], results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    better = results.get("higher_is_better", {}).get(task, {})
    found = {}
    for key, value in entry.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = entry.get(f"{metric}_stderr,{chosen}")
        found[metric if chosen == "none" else key] = {
            "value": value,
            "stderr": stderr if isinstance(stderr, int | float) else None,  # "N/A" where there is none
            "higher_is_better": better.get(metric),
        }
    return found


def versions_of(results: dict[str, Any]) -> dict[str, Any]:
    """Versions and settings that hold for all tasks of a results file."""
    config = results.get("config", {})
    return {
        "lm_eval": results.get("lm_eval_version"),
        "transformers": results.get("transformers_version"),
        "model_dtype": config.get("model_dtype"),
        "device": config.get("device"),
        "batch_size": config.get("batch_size"),
        "seeds": {key: value for key, value in config.items() if key.endswith("_seed")},
    }
