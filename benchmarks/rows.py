"""A row of the speed table: the raw file that holds its measurements, and the figures that follow from it.

A raw file is ``<workload>-<peer>-<n>gpu-<gpu>.json``: ``identity`` (what must be equal for its runs to count),
``title`` of the peer, ``environment``, ``flops_per_token``, ``tokens_per_step`` (of one GPU), ``notes``, ``tries``
(settings that were tried and what came of them) and ``runs`` in the order in which they ended. It is written after
every run, whole or not at all. What could not be known is null.
"""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.side import WINDOW
from benchmarks.workloads import WARM_UP

RESULTS = Path(__file__).parent / "results"
SPEED = RESULTS / "speed"


def file_name(workload: str, peer: str, ngpu: int, gpu: str | None) -> str:
    """Of the raw file; ``gpu`` as the driver calls it, None without one."""
    card = re.sub(r"[^a-z0-9]+", "-", (gpu or "cpu").lower().removeprefix("nvidia ")).strip("-")
    return f"{workload}-{peer}-{ngpu}gpu-{card}.json"


def load_raw(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """The raw file, if it holds measurements of the same ``identity``."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return raw if raw.get("identity") == identity else None


def save_raw(path: Path, raw: dict[str, Any]) -> None:
    """Write it, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def good_runs(raw: dict[str, Any], side: str) -> list[dict[str, Any]]:
    """Runs of a side that ended well."""
    return [run for run in raw["runs"] if run["side"] == side and "error" not in run]


def failure(raw: dict[str, Any], side: str) -> str | None:
    """Why a side has no further runs, if it failed."""
    return next((run["error"] for run in raw["runs"] if run["side"] == side and "error" in run), None)


def lacks(raw: dict[str, Any], side: str, runs: int) -> bool:
    """Whether fewer than ``runs`` runs of the side are there, and none has failed."""
    return failure(raw, side) is None and len(good_runs(raw, side)) < runs


def rates(run: dict[str, Any], tokens_per_step: int, warm_up: int = WARM_UP) -> list[float]:
    """Tokens/s a GPU over each window of WINDOW steps after ``warm_up``."""
    times = run["step_times_s"]
    if times is None:
        return run["window_tokens_per_s"]
    windows = [times[first : first + WINDOW] for first in range(warm_up, len(times) - WINDOW + 1, WINDOW)]
    return [tokens_per_step * WINDOW / sum(window) for window in windows]


def row_of(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """The row of a raw file ``name``. Rates are medians over the windows of all runs of a side; TFLOP/s of both sides
    follow from them by one formula (torchtitan's); memory is the peak of any run. A side without a good run has null,
    and ``error`` says why.
    """
    identity = raw["identity"]
    peer, warm_up = identity["peer"], identity.get("warm_up", WARM_UP)
    row: dict[str, Any] = {"workload": identity["workload"], "peer": raw["title"], "ratio": None}
    figures: dict[str, dict[str, Any]] = {}
    for label, side in (("ours", "ours"), ("peer", peer)):
        runs = good_runs(raw, side)
        windows = [rate for run in runs for rate in rates(run, raw["tokens_per_step"], warm_up)]
        speed = statistics.median(windows) if windows else None
        memory = [run["reserved_gib"] for run in runs if run["reserved_gib"] is not None]
        figures[label] = {
            "tokens_per_s": speed,
            "tflops": speed * raw["flops_per_token"] / 1e12 if speed else None,
            "reserved_gib": max(memory) if memory else None,
            "loss": list(runs[-1]["losses"].values())[-1] if runs else None,
            "max_violation": runs[-1].get("max_violation") if runs else None,
        }
    if figures["ours"]["tokens_per_s"] and figures["peer"]["tokens_per_s"]:
        row["ratio"] = figures["ours"]["tokens_per_s"] / figures["peer"]["tokens_per_s"]
    for key in ("tokens_per_s", "tflops", "reserved_gib", "loss", "max_violation"):
        row |= {f"{label}_{key}": values[key] for label, values in figures.items()}
    sides = (("ours", "ours"), ("peer", peer))
    errors = [f"{side}: {reason}" for _, side in sides if (reason := failure(raw, side))]
    return row | {
        "gpu": identity["gpu"],
        "ngpu": identity["ngpu"],
        "torch": identity["torch"],
        "commit": identity["commit"],
        "settings": {label: _setting(raw, side) for label, side in sides},
        "runs": {label: len(good_runs(raw, side)) for label, side in sides},
        "steps": identity["steps"] - warm_up,
        "error": "; ".join(errors) or None,
        "notes": raw["notes"],
        "raw": name,
    }


def _setting(raw: dict[str, Any], side: str) -> str | None:
    runs = good_runs(raw, side)
    return runs[-1]["setting"] if runs else None


def sentence(row: dict[str, Any]) -> str:
    """The row for the eye."""

    def pair(key: str, form: str) -> str:
        shown = [format(row[f"{side}_{key}"], form) if row[f"{side}_{key}"] else "-" for side in ("ours", "peer")]
        return " / ".join(shown)

    ratio = f"{row['ratio']:.3f} x" if row["ratio"] else "no ratio"
    text = (
        f"{row['workload']} beside {row['peer']}, {row['ngpu']} x {row['gpu'] or 'CPU'}: {ratio}"
        f"  ({pair('tokens_per_s', ',.0f')} tokens/s a GPU, {pair('tflops', ',.1f')} TFLOP/s,"
        f" {pair('reserved_gib', '.1f')} GiB, loss {pair('loss', '.3f')})"
    )
    if row["ours_max_violation"] is not None:
        text += f"  MaxVio {pair('max_violation', '.2f')}"
    return text + (f"  [{row['error']}]" if row["error"] else "")
