"""``check`` and ``list``: all questions at a glance, without torch."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path

from ablation.guard import Guarded, guard
from ablation.plan import folders, plan
from ablation.question import all_files, find, read
from ablation.runner import state_of
from config.errors import ConfigError


def check(arguments: list[str]) -> int:
    """``check [NAME ...]``: every violation of every question, or a line on what it would run. 2 if there is one."""
    for word in arguments:
        if word.startswith("-"):
            raise ConfigError(f"check {word}: takes names of questions only")
    refused = 0
    for path in [find(name) for name in arguments] or all_files():
        try:
            guarded = guard(read(path)).accepted()
        except ConfigError as error:
            print(error, file=sys.stderr)
            refused += 1
        else:
            print(summary(guarded))
    if refused:
        print(f"{refused} refused", file=sys.stderr)
    return 2 if refused else 0


def summary(guarded: Guarded) -> str:
    """``load_balance: variable moe.balance, 4 arms x 3 seeds + 6 A/A = 18 runs``."""
    question, table = guarded.question, guarded.question.table
    factors = [f"{len(guarded.arms)} arm{'s' if len(guarded.arms) > 1 else ''}"]
    if table.tune:
        factors.append(f"{prod(len(grid) for grid in table.tune.values())} tunings")
    factors.append(f"{len(table.seeds)} seed{'s' if len(table.seeds) > 1 else ''}")
    aa = f" + {2 * len(table.seeds)} A/A" if table.aa else ""
    what = f"variable {', '.join(question.variables)}" if question.variables else "A/A only"
    design = f" ({table.design})" if table.design else ""
    return f"{question.name}: {what}{design}, {' x '.join(factors)}{aa} = {len(plan(guarded).runs)} runs"


def list_questions(arguments: list[str]) -> int:
    """``list``: every question with its variable, arms and what of it is done under its dump_folder."""
    if arguments:
        raise ConfigError(f"list {arguments[0]}: takes no arguments; check NAME looks at one question")
    for path in all_files():
        try:
            guarded = guard(read(path)).accepted()
        except ConfigError:
            print(f"{path.stem}: refused; python -m ablation check {path.stem}\n")
            continue
        print(summary(guarded))
        print(f"    {guarded.question.table.question}")
        print(f"    arms: {', '.join(_marked(guarded))}")
        for line in _progress(guarded):
            print(f"    {line}")
        print()
    return 0


def _marked(guarded: Guarded) -> list[str]:
    table = guarded.question.table
    marks = {table.baseline: " (baseline)", **{name: " (reference)" for name in table.references}}
    return [name + marks.get(name, "") for name in guarded.arms]


def _progress(guarded: Guarded) -> list[str]:
    """A line for each folder of results and number of processes in it."""
    root = Path(guarded.arms[guarded.question.table.baseline].resolved.config.job.dump_folder)
    lines = []
    for folder in folders(guarded.question, root):
        names = {record.parent.name for record in folder.glob("*/**/run.json")}
        counts = sorted({int(n.partition("-")[2].partition("gpu")[0]) for n in names if n.startswith("seed")})
        for gpus in counts:
            runs = plan(guarded, gpus).runs
            states = [state_of(folder / run.place) for run in runs]
            failed = f", {states.count('failed')} failed" if "failed" in states else ""
            report = f", {folder}/report/report.html" if (folder / "report/report.html").is_file() else ""
            lines.append(f"{folder}: {states.count('done')} of {len(runs)} done on {gpus} GPU(s){failed}{report}")
    return lines or ["no results"]
