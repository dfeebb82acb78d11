"""Declared ``tune`` grids: every arm tries the same points, arms meet at their best ones, edges are flagged."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ablation.measures import lower_is_better, value_at_tokens
from ablation.runs import Run
from ablation.sides import Item, listed
from ablation.statistics import mean


@dataclass(frozen=True)
class Tuned:
    """An arm at its best point. ``points``: one row a grid point, for the report; ``items``: lines for the
    validity box.
    """

    runs: list[Run]
    points: list[dict[str, Any]]
    items: list[Item]
    noise: list[Run]
    """Runs of the point that has most of them, which is where the baseline's A/A runs are."""


def best_point(runs: Sequence[Run], question: dict[str, Any], metric: str, tokens: float) -> Tuned:
    """The runs of the grid point with the best mean metric over seeds, chosen alike for the baseline and the
    candidates.

    The choice is made on the seeds that are then compared, which favours every tuned arm by the same small amount.
    """
    points: dict[str, list[Run]] = {}
    for run in runs:
        points.setdefault(json.dumps(run.tune, sort_keys=True), []).append(run)
    if len(points) == 1 and not question.get("tune"):
        return Tuned(list(runs), [], [], list(runs))
    asked = {str(seed) for seed in question.get("seeds") or []} or {run.seed for run in runs}
    sign = 1.0 if lower_is_better(metric) else -1.0
    rows: list[dict[str, Any]] = []
    for members in points.values():
        ranked_runs = [run for run in members if run.repeat == 0 and run.seed in asked]
        values = [value_at_tokens(run, metric, tokens) for run in ranked_runs]
        known = [v for v in values if v is not None and math.isfinite(v)]
        rows.append({"values": members[0].tune, "mean": mean(known) if known else None, "n": len(known), "best": False})
    ranked = [(sign * row["mean"], index) for index, row in enumerate(rows) if row["mean"] is not None]
    best = min(ranked)[1] if ranked else 0
    rows[best]["best"] = True
    chosen = list(points.values())[best]
    items = [_complete(rows, question, runs[0].arm), _inside(rows, chosen[0])]
    return Tuned(chosen, rows, items, max(points.values(), key=len))


def _complete(rows: list[dict[str, Any]], question: dict[str, Any], arm: str) -> Item:
    name = "tune grid complete"
    grid = question.get("tune") or {}
    asked = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    missing = [point for point in asked if point not in [row["values"] for row in rows]]
    if missing:
        return Item(name, "INVALID", f"{arm}: no run at {listed(show_point(point) for point in missing)}")
    counts = {row["n"] for row in rows}
    if len(counts) > 1:
        return Item(name, "INVALID", f"{arm}: grid points have {listed(sorted(counts))} seeds that count")
    return Item(name, "ok", f"{arm}: {len(rows)} points")


def _inside(rows: list[dict[str, Any]], chosen: Run) -> Item:
    name = "tuned optimum inside the grid"
    edges = []
    for key, value in chosen.tune.items():
        tried = sorted({row["values"][key] for row in rows if isinstance(row["values"].get(key), int | float)})
        if len(tried) > 1 and value in (tried[0], tried[-1]):
            edges.append(f"{key} = {value:g} is the {'smallest' if value == tried[0] else 'largest'} tried")
    where = f"{chosen.arm}: {show_point(chosen.tune)}"
    return Item(name, "warning" if edges else "ok", f"{chosen.arm}: {listed(edges)}" if edges else where)


def show_point(point: dict[str, Any]) -> str:
    """A grid point in words."""
    return " ".join(
        f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value}" for key, value in point.items()
    )
