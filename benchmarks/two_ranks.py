"""What the tables of two ranks share: runs that are kept and not repeated, what they left, and how a table is written.

A table is a list of runs, each some keys over a base configuration. Runs are made one after the other under a folder,
so the same command goes on after a stop, and with a budget it begins no run that would not end in time. A run that
fails is a row that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.run_files import metrics_lines, timed_steps
from benchmarks.side import ROOT

LOSS, BUBBLE = "loss_metrics/global_avg_loss", "pipeline/bubble(%)"
MEMORY, EXPOSED, COMMUNICATION = "memory/max_reserved(GiB)", "comm/exposed(%)", "comm/total(%)"
RANKS = 2
WARM_UP = 10
"""Steps that say nothing about speed, beside those that the run itself leaves out."""
PROFILED = 3
"""Steps at the end of a run that are profiled, after as many of warm-up."""
FORMS = {
    "tokens_per_second_per_rank": ",.0f", "reserved_gib": ".1f", "exposed_communication_percent": ".1f",
    "communication_percent": ".1f", "final_loss": ".4f", "largest_difference": ".1e",
}  # fmt: skip
"""Column of a table of layouts that are held against one -> how it is written."""


def common_keys(steps: int) -> dict[str, Any]:
    """What every run sets: ``steps`` in bfloat16, a log line each, the last ones profiled, nothing beside them."""
    return {
        "training.steps": steps,
        "training.mixed_precision_param": "bfloat16",
        "data.roots": [],  # the standard library alone: read in seconds, and more than a table consumes
        "validation.enable": False,
        "checkpoint.enable": False,
        "metrics.log_freq": 1,
        "profiling.enable_profiling": True,
        "profiling.profile_freq": steps,
        "profiling.profiler_active": PROFILED,
        "profiling.profiler_warmup": PROFILED,
    }


def command(base: Path, folder: Path, changes: dict[str, Any]) -> list[str]:
    """The words that run one of them."""
    words = [sys.executable, str(ROOT / "ablation_train.py"), "--job.config_file", str(base)]
    for key, value in (changes | {"job.run_dir": str(folder)}).items():
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


def state(folder: Path) -> str:
    """ "done", "failed" or "open": to be run, or run again after a stop."""
    if (folder / "DONE").is_file():
        return "done"
    failed = folder / "FAILED"
    return "failed" if failed.is_file() and json.loads(failed.read_text())["reason"] != "interrupted" else "open"


def run_all(
    runs: dict[str, dict[str, Any]], base: Path, root: Path, *, until: float, say: Callable[[str], None] = print
) -> bool:
    """Run what is not done; True when nothing is left. A failed run is left alone: remove its folder to try again.

    Args:
        until: ``time.monotonic()`` after which nothing runs. A run is begun when the longest so far would end by then.
    """
    longest = 0.0
    for name, changes in runs.items():
        folder = root / folder_name(name)
        if state(folder) != "open":
            continue
        begun = time.monotonic()
        if begun + longest > until:
            say(f"out of time before {name}: the same command goes on")
            return False
        say(f"{name} ...")
        environment = os.environ | {"NGPU": str(RANKS)}
        words = command(base, folder, changes)
        done = subprocess.run(words, cwd=ROOT, env=environment, text=True, capture_output=True)
        if state(folder) == "open":  # refused or killed before it could say so
            folder.mkdir(parents=True, exist_ok=True)
            reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            (folder / "FAILED").write_text(json.dumps({"reason": reason[0]}))
        longest = max(longest, time.monotonic() - begun)
        say(f"{name}: {state(folder)} in {time.monotonic() - begun:.0f} s")
    return True


def folder_name(name: str) -> str:
    """Of a run's directory."""
    return name.lower().replace(",", "").replace(" ", "_")


def read(folder: Path) -> dict[str, Any]:
    """What a run left: ``losses`` (step -> nats), ``step_s`` (median), ``tokens_per_step``, ``world_size`` and tags.

    A run that failed has ``error`` alone. What was not measured is None.
    """
    if state(folder) != "done":
        failed = folder / "FAILED"
        return {"error": json.loads(failed.read_text())["reason"] if failed.is_file() else "not run"}
    lines = metrics_lines(folder)
    record = json.loads((folder / "run.json").read_text())
    logged = [line for line in lines if LOSS in line]
    times = [seconds for step, seconds in timed_steps(logged) if step > WARM_UP]
    seen = {tag: [line[tag] for line in lines if tag in line] for tag in (MEMORY, EXPOSED, COMMUNICATION, BUBBLE)}
    return {
        "losses": {line["step"]: line[LOSS] for line in logged},
        "step_s": statistics.median(times) if times else None,
        "tokens_per_step": record["tokens_per_step"],
        "world_size": record["world_size"],
        MEMORY: max(seen[MEMORY], default=None),
        **{tag: seen[tag][-1] if seen[tag] else None for tag in (EXPOSED, COMMUNICATION)},
        BUBBLE: statistics.median(seen[BUBBLE]) if seen[BUBBLE] else None,
    }


def about(root: Path, chosen: argparse.Namespace, **batch: Any) -> dict[str, Any]:
    """Where and with what the runs were made, from the first that says; ``batch`` is what the table says of it."""
    found: dict[str, Any] = {"base": chosen.base.name, **batch}
    for path in sorted(root.glob("*/environment.json")):
        environment = json.loads(path.read_text())
        found |= {key: environment.get(key) for key in ("gpu_name", "torch", "cuda", "nccl")}
        return found | {"commit": environment.get("git_commit") or chosen.commit}
    return found


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """The columns that every table has of a run that :func:`read` found done."""
    losses, step_s = result["losses"], result["step_s"]
    return {
        "tokens_per_second_per_rank": step_s and result["tokens_per_step"] / result["world_size"] / step_s,
        "reserved_gib": result[MEMORY],
        "exposed_communication_percent": result[EXPOSED],
        "communication_percent": result[COMMUNICATION],
        "final_loss": losses[max(losses)],
    }


def cells(row: dict[str, Any], forms: dict[str, str]) -> list[str]:
    """Keys of a row as text, by their format; "-" where nothing was measured."""
    return ["-" if row[key] is None else format(row[key], form) for key, form in forms.items()]


def facts(record: dict[str, Any]) -> str:
    """What is known of ``record``, in a line."""
    return ", ".join(f"{key} {value}" for key, value in record.items() if value is not None)


def parser_of(module: str, what: str, base: str, steps: int, rows: Iterable[str]) -> argparse.ArgumentParser:
    """The options that every table has.

    Args:
        module: of the table, in benchmarks/.
        what: it is, in a sentence.
        base: file in train_configs/ that its rows change.
        steps: by default.
        rows: names that --only knows.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=what)
    parser.add_argument("--base", type=Path, default=ROOT / "train_configs" / base, metavar="TOML")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / module, help="of the runs")
    parser.add_argument("--out", type=Path, help="of the table, without a suffix: .json and .md (default: in --folder)")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--only", default="", metavar="A;B", help=f"of {'; '.join(rows)}")
    parser.add_argument("--commit", help="of the checkout, where git is not at hand")
    parser.add_argument("--budget_s", type=float, default=float("inf"), help="seconds after which nothing runs")
    return parser


def check_steps(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """End the program when --steps leaves none that tells a speed."""
    if chosen.steps <= WARM_UP + 2 * PROFILED:
        parser.error(
            f"--steps must be above {WARM_UP + 2 * PROFILED}: the first {WARM_UP} and the profiled tell no speed"
        )


def only(parser: argparse.ArgumentParser, chosen: argparse.Namespace, rows: Iterable[str]) -> list[str]:
    """The rows of --only; all without it. Ends the program when one is none of ``rows``."""
    names = [name for name in chosen.only.split(";") if name]
    if unknown := [name for name in names if name not in rows]:
        parser.error(f"--only: {unknown[0]!r} is none of {'; '.join(rows)}")
    return names or list(rows)


def measured(
    chosen: argparse.Namespace, runs: dict[str, dict[str, Any]], root: Path
) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Run what is not done under ``root``. Whether nothing is left, and what each run left."""
    complete = run_all(runs, chosen.base.resolve(), root, until=time.monotonic() + chosen.budget_s)
    return complete, {name: read(root / folder_name(name)) for name in runs}


def write(out: Path, found: dict[str, Any], page: str) -> None:
    """The table as ``out``.json and ``out``.md, and on the console."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    out.with_suffix(".md").write_text(page)
    print(page)
