"""The second half of a report: tune grids, environment, commands, checklist, every run."""

from __future__ import annotations

import shlex
from typing import Any

from ablation.document import Block, Code, Folded, Heading, Numbers, Table, Text, Tone, cell
from ablation.tuning import show_point
from ablation.wording import loss_decimals


def evidence_blocks(result: dict[str, Any]) -> list[Block]:
    """The blocks after the curves and the noise."""
    return [*_tuning(result), *_environment(result), *_checklist(result), *_appendix(result)]


def _tuning(result: dict[str, Any]) -> list[Block]:
    rows = [
        [cell(label), cell(show_point(p["values"])), Numbers(result).plain(f"tune/{label}/{i}/mean", 4),
         cell(str(p["n"])), cell("compared" if p["best"] else "", tone="good")]
        for label, points in result["tune"].items() for i, p in enumerate(points)
    ]  # fmt: skip
    return [Heading("Tune grid"), Table(["arm", "point", "mean", "n", ""], rows)] if rows else []


def _environment(result: dict[str, Any]) -> list[Block]:
    rows = [
        [cell(key), cell(" | ".join(values), tone="warning" if len(values) > 1 and key != "dirty.patch" else "")]
        for key, values in sorted(result["environment"].items())
    ]
    name, directory = result["name"], shlex.quote(result["directory"])
    lines = "\n".join(result["commands"]) or "(no command recorded)"
    again = (
        f"NGPU={max(a['devices'] for a in result['arms'].values())}"
        f" ./run_ablation.sh {shlex.join([name, *result['asked_with']])}\n"
        if result["question"]
        else ""
    )
    return [
        Heading("Environment"),
        Folded(f"{len(rows)} properties; more than one value is marked", [Table(["property", "value"], rows)]),
        Heading("Reproduce"),
        Code(f"{again}tensorboard --logdir {directory}"),
        Folded(f"The exact commands of {len(result['commands'])} runs", [Code(lines)]),
    ]


def _checklist(result: dict[str, Any]) -> list[Block]:
    tones: dict[str, Tone] = {"filled": "good", "missing": "bad", "not applicable": "muted"}
    rows = [[cell(r["state"], tone=tones[r["state"]]), cell(r["item"]), cell(r["text"])] for r in result["checklist"]]
    return [Heading("Reproduction checklist"), Table(["", "item", "found"], rows)]


def _appendix(result: dict[str, Any]) -> list[Block]:
    numbers, rows, excluded = Numbers(result), [], []
    for i, run in enumerate(result["runs"]):
        path = f"runs/{i}"
        tone: Tone = "" if run["state"] == "DONE" else "bad"
        state = cell(run["state"] + (f": {run['reason']}" if run["reason"] else ""), tone=tone)
        name = f"{run['arm']} seed {run['seed']}" + (f" repeat {run['repeat']}" if run["repeat"] else "")
        if run["tune"]:
            name += f" ({show_point(run['tune'])})"
        rows.append([
            cell(name), state, numbers.plain(f"{path}/metric", loss_decimals(result)),
            numbers.plain(f"{path}/tokens_per_second_device"), cell(str(run["steps"])), cell(str(run["timed_steps"])),
            cell(str(run["attempts"])), cell(run["started"][:16].replace("T", " "), tone="muted"),
            cell(run["directory"], tone="muted"),
        ])  # fmt: skip
        warned = "; ".join(run["warnings"])
        excluded.append([cell(name), cell(run["excluded_steps"] or "none"), cell(warned)])
    failed = sum(run["state"] != "DONE" for run in result["runs"])
    columns = [
        "run",
        "state",
        result["decision"]["metric"],
        "tokens/s/device",
        "steps",
        "timed",
        "tries",
        "started",
        "directory",
    ]
    return [
        Heading("Every run"),
        Text(f"{len(rows)} runs were found and all are listed; {failed} did not finish."),
        Table(columns, rows),
        Folded("Steps left out of throughput (compilation, warm-up, checkpoint, validation, profile) and warnings",
               [Table(["run", "excluded steps", "warnings"], excluded)]),
    ]  # fmt: skip
