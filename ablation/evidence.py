"""What stands behind the verdicts in a report: curves, environment, commands, every run, the reproduction
checklist.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from typing import Any

from ablation.measures import throughput, training_seconds, value_at_tokens
from ablation.runs import TRAIN_LOSS, Run
from ablation.statistics import mean, quantile

CURVE_POINTS = 240  # of one line in a figure and in report.json; longer series are averaged in blocks


def _blocks(points: Sequence[tuple[float, float, float]]) -> list[list[float]]:
    """At most CURVE_POINTS points, each the mean of a block, as one list a coordinate."""
    size = math.ceil(len(points) / CURVE_POINTS) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return (
        [[mean([point[axis] for point in part]) for part in parts] for axis in range(len(points[0]))] if points else []
    )


def curves(run: Run, metric: str) -> dict[str, Any]:
    """Series of one run: {"train": ..., "metric": ..., "rate": ...}, each {"tokens", "seconds", "values"}.

    ``rate`` is tokens/s/device from the median of each log line's steps that count.
    """
    seconds = training_seconds(run)
    table: dict[str, Any] = {}
    for name, tag in (("train", TRAIN_LOSS), ("metric", metric)):
        points = [
            (float(step * run.tokens_per_step), seconds[step], value)
            for step, value in run.series(tag)
            if step in seconds and math.isfinite(value)
        ]
        table[name] = dict(zip(("tokens", "seconds", "values"), _blocks(points), strict=False))
    rates = []
    for line in run.lines:
        last = int(line["step"])
        steps = range(last - len(line.get("step_times_s") or []) + 1, last + 1)
        times = [run.step_times[step] for step in steps if run.counts(step)]
        if times:
            tokens = run.tokens_per_step * line.get("data/fill_rate", 1.0)
            rate = tokens / quantile(times, 0.5) / run.world_size
            rates.append((float(last * run.tokens_per_step), seconds[last], rate))
    table["rate"] = dict(zip(("tokens", "seconds", "values"), _blocks(rates), strict=False))
    return table


def step_ranges(steps: Sequence[int]) -> str:
    """Step numbers with runs of neighbours shortened: "1-3, 50"."""
    parts: list[list[int]] = []
    for step in sorted(steps):
        if parts and step == parts[-1][1] + 1:
            parts[-1][1] = step
        else:
            parts.append([step, step])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in parts)


def run_row(run: Run, label: str, metric: str, tokens: float) -> dict[str, Any]:
    """A run of the appendix, failed ones like the rest."""
    value = value_at_tokens(run, metric, tokens)
    return {
        "arm": label, "directory": str(run.path), "seed": run.seed, "devices": run.world_size, "repeat": run.repeat,
        "tune": run.tune, "state": run.state, "reason": str(run.finish.get("reason", "")),
        "steps": int(run.lines[-1]["step"]) if run.lines else 0,
        "metric": value if value is not None and math.isfinite(value) else None,
        "tokens_per_second_device": throughput(run), "timed_steps": len(run.steady_times),
        "excluded_steps": step_ranges(list(run.excluded_steps)), "attempts": run.attempts + 1,
        "started": run.started, "finished": str(run.finish.get("finished", "")),
        "warnings": [str(w) for w in run.record.get("warnings") or []],
    }  # fmt: skip


def environment(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Every recorded property of host and software -> its distinct values over all runs."""
    table: dict[str, list[str]] = {}
    for run in runs:
        for key, value in run.environment.items():
            flat = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
            for name, item in flat.items():
                text = item if isinstance(item, str) else json.dumps(item)
                if text not in table.setdefault(name, []):
                    table[name].append(text)
        for name, value in (("corpus_hash", run.record.get("corpus_hash")), ("dirty.patch", run.patch_hash)):
            if value and str(value) not in table.setdefault(name, []):
                table[name].append(str(value))
    return table


def commands(runs: Sequence[Run]) -> list[str]:
    """The exact command of every run, in order of start."""
    ordered = sorted(runs, key=lambda run: run.started)
    return [shlex.join(str(word) for word in run.record["command"]) for run in ordered if run.record.get("command")]


def asked_with(runs: Sequence[Run]) -> list[str]:
    """What was typed behind the question's name for all of them, such as ["--training.steps", "300"].

    The runner puts it last, after the run directory and the tuned keys (plan.py). Empty where runs were started by
    hand, or not all alike.
    """
    found = {tuple(_typed(run)) for run in runs}
    return list(found.pop()) if len(found) == 1 else []


def _typed(run: Run) -> list[str]:
    words = [str(word) for word in run.record.get("command") or []]
    if "--job.run_dir" not in words:
        return []
    return words[words.index("--job.run_dir") + 2 + 2 * len(run.tune) :]


def _values_of(runs: Sequence[Run], key: str) -> list[str]:
    return list(dict.fromkeys(str(run.config[key]) for run in runs if run.config.get(key) is not None))


def _millions(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def checklist(runs: Sequence[Run], comparisons: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """What a reader needs to reproduce the result: {"item", "state": "filled" | "missing" | "not applicable",
    "text"}.
    """
    rows: list[dict[str, str]] = []

    def add(item: str, text: str, state: str = "") -> None:
        rows.append({"item": item, "state": state or ("filled" if text else "missing"), "text": text})

    env = environment(runs)
    devices = [name for name in env.get("gpu_name", []) if name != "null"] or env.get("cpu", [])
    topology = [name for name in env.get("gpu_topology", []) if name != "null"]
    if not [name for name in env.get("gpu_name", []) if name != "null"]:
        topology = ["processes of one host, no GPU"]
    counts = sorted({run.world_size for run in runs})
    single = counts == [1]
    hardware = f"{', '.join(map(str, counts))} x {' / '.join(devices)}" if devices else ""
    add("hardware", hardware)
    add("topology", "one device" if single else " / ".join(topology), "not applicable" if single else "")
    baseline = env.get("comm_baseline") or []
    add("communication baseline", "one device" if single else " / ".join(baseline), "not applicable" if single else "")
    parameters = {run.arm: run.record.get("parameters") or {} for run in runs}
    sparse = {arm: p for arm, p in parameters.items() if p.get("total") and p.get("active", p["total"]) < p["total"]}
    dense = [arm for arm in parameters if arm not in sparse]
    if sparse:
        add("dense baseline", f"arm {', '.join(dense)}" if dense else "")
    else:
        add("dense baseline", "every arm is dense", "not applicable")
    sizes = {arm: (p["total"], p.get("active", p["total"])) for arm, p in parameters.items() if p.get("total")}
    told = [f"{arm} {_millions(total)} / {_millions(active)}" for arm, (total, active) in sizes.items()]
    add("total and active parameters", "; ".join(told))
    memory = ("peak active memory", "peak resident memory")
    peaks = [c["arm"] for c in comparisons if any(row["name"] in memory and row["candidate"] for row in c["metrics"])]
    add("memory", f"peaks of {', '.join(peaks)} beside the baseline's, in the paired tables" if peaks else "")
    tags = {tag for run in runs for line in run.lines[-1:] for tag in line if tag.startswith("moe/")}
    if sparse:
        add("expert and device load", ", ".join(sorted(tags)))
        routers = [", ".join(_values_of(runs, key)) for key in ("moe.router_dtype", "moe.score_func")]
        add("router precision and score function", "; ".join(routers) if all(routers) else "")
    else:
        add("expert and device load", "every arm is dense", "not applicable")
        add("router precision and score function", "every arm is dense", "not applicable")
    both = [c["arm"] for c in comparisons if c["loss"]["value"] is not None and c["speed"]["value"] is not None]
    add("loss beside throughput", ", ".join(both) if both else "")
    seeds = list(dict.fromkeys(run.seed for run in runs))
    timed = sorted({len(run.steady_times) for run in runs})
    window = f"{'-'.join(map(str, dict.fromkeys((timed[0], timed[-1]))))} timed steps a run" if any(timed) else ""
    add("seeds and window", f"seeds {', '.join(seeds)}; {window}" if seeds and window else "")
    return rows


def expert_load(runs: Sequence[Run]) -> list[list[float]] | None:
    """Load / mean of every expert (columns) of every MoE layer (rows) at the end, averaged over runs; None if not
    logged.

    Reads the last line of each run's moe_loads.jsonl: {"step", "counts": layers x experts}.
    """
    grids = []
    for run in runs:
        lines = run.lines_of("moe_loads.jsonl")
        if lines and all(sum(row) for row in lines[-1]["counts"]):
            grids.append([[load * len(row) / sum(row) for load in row] for row in lines[-1]["counts"]])
    if not grids or len({tuple(len(row) for row in grid) for grid in grids}) != 1:
        return None
    return [[mean(cells) for cells in zip(*rows, strict=True)] for rows in zip(*grids, strict=True)]
