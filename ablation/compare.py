"""``python -m ablation compare RUNS...``: run directories in; verdict lines on the console and a report out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ablation.document import DASH, Numbers, Table
from ablation.report import write_report
from ablation.report_noise import noise_blocks
from ablation.result import Rule, build_result
from ablation.run_files import left_nothing
from ablation.runs import find_runs
from ablation.wording import (
    decision_line,
    expectation_line,
    left_nothing_line,
    loss_cell,
    memory_cell,
    metric_cell,
    speed_cell,
)
from config.errors import ConfigError


def main(args: list[str]) -> int:
    """Compare the given run directories and write their report. Exit code 0, or 2 for a mistake of the user."""
    parser = argparse.ArgumentParser(prog="python -m ablation compare", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUNS", help="an ablation's output directory, or run directories"
    )
    parser.add_argument(
        "--against",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="older outputs of the same ablation, bridged over the baseline",
    )
    parser.add_argument("--out", type=Path, help="where the report goes (default: report/ beside the arms)")
    plain = parser.add_argument_group("for runs of no ablation", "an ablation's file says these for its runs")
    plain.add_argument("--metric", default="", help="tag of metrics.jsonl that decides (default: validation loss)")
    plain.add_argument("--step", type=int, default=0, help="step at which it is read (default: the last)")
    plain.add_argument("--equivalent_within", type=float, help="difference below which two arms count as equivalent")
    given = parser.parse_args(args)
    try:
        rule = Rule(given.metric, given.step, given.equivalent_within)
        result, folder = compare_directories(given.runs, given.against, given.out, rule)
        notes = write_report(result, folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(console(result))
    for note in notes:
        print(note)
    print(f"report: {folder / 'report.html'}")
    return 0


def compare_directories(
    paths: Sequence[Path], against: Sequence[Path] = (), out: Path | None = None, rule: Rule | None = None
) -> tuple[dict[str, Any], Path]:
    """The result of comparing directories, and the folder its report belongs in.

    Raises:
        ConfigError: nothing to compare, or a rule given for runs that bring their own.
    """
    runs = find_runs(paths)
    if rule is not None and rule != Rule() and runs[0].question:
        raise ConfigError(
            "compare: --metric, --step and --equivalent_within are for plain runs; these were decided in "
            f"{runs[0].record['ablation'].get('file', 'their ablation file')}, [ablation.decide]"
        )
    older = find_runs(against) if against else []
    folder = Path(os.path.commonpath([path.resolve() for path in paths]))
    if (folder / "run.json").exists():
        folder = folder.parent
    result = build_result(runs, older, rule)
    result["directory"] = os.path.relpath(folder)
    result["left_nothing"] = [os.path.relpath(log.resolve(), folder) for log in left_nothing([*paths, *against])]
    for row in result["runs"]:
        row["directory"] = os.path.relpath(Path(row["directory"]).resolve(), folder)
    return result, out or Path(os.path.relpath(folder)) / "report"


def console(result: dict[str, Any]) -> str:
    """A compact table of the arms, then what is wrong or was promised."""
    numbers = Numbers(result)
    rows = [["arm", "loss", "difference", "speed", "tokens/s", "GiB", "device-h", "tier"]]
    remarks = []
    for i, c in enumerate(result["comparisons"]):
        rows.append([
            c["arm"], c["loss"]["phrase"], loss_cell(numbers, i).text,
            c["speed"]["phrase"], speed_cell(numbers, i).text,
            memory_cell(numbers, i).text.removesuffix(" GiB"),
            metric_cell(numbers, i, "device-hours").text, c["tier"],
        ])  # fmt: skip
        told = [item for item in c["validity"] if item["status"] != "ok"]
        remarks += [f"{c['arm']}: {item['status']}: {item['name']}: {item['reason']}" for item in told]
        if expectation_line(c):
            remarks.append(f"{c['arm']}: {expectation_line(c)}")
    remarks += [left_nothing_line(result)] if result["left_nothing"] else []
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if not result["comparisons"]:
        tables = [block for block in noise_blocks(result) if isinstance(block, Table)]
        lines = ["  ".join(cell.text for cell in row if cell.text != DASH) for table in tables for row in table.rows]
    return "\n".join([f"{result['name']}, against {result['baseline']}", *lines, *remarks, decision_line(result).text])
