"""From a question to its runs: which, in which order, where, and by which command.

```
outputs/<question>[-2]/<arm>[/tune-lr=0.0003,eps=1e-08]/seed<k>-<n>gpu[-repeat2]/     one run, written by train.py
                                                        seed<k>-<n>gpu[-repeat2].log  its console output
```

The order is interleaved: every arm runs once before any arm runs on the next seed, and every other seed goes through
the arms backwards (A B C, C B A, ...), so that a drift of the machine cancels in the paired differences. The two A/A
runs of a seed, the baseline on the same seed again and on a disjoint one, are arms like the others in it. Under a
``tune`` grid each of its points is a run of every arm; the A/A runs take its middle point, where a good grid has its
optimum.

A folder never holds runs of two versions of a question: a run directory whose configuration is not what the file says
now is refused, naming the key, unless a new folder is asked for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ablation.differences import changed
from ablation.guard import Guarded
from ablation.question import ROOT, Question, guess, relative
from config import command_line, paths
from config.errors import ConfigError
from config.keys import shown
from config.load import flatten, load_file

Point = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Run:
    """One training run. ``index`` counts from 1 in the order of execution; ``tune`` is its point of the grid."""

    index: int
    arm: str
    seed: int
    gpus: int
    repeat: int = 1
    tune: Point = ()

    @property
    def place(self) -> Path:
        """Its directory, relative to the folder of the question."""
        name = f"seed{self.seed}-{self.gpus}gpu" + (f"-repeat{self.repeat}" if self.repeat > 1 else "")
        point = ",".join(f"{key.rpartition('.')[2]}={_label(value)}" for key, value in self.tune)
        return Path(self.arm, f"tune-{point}", name) if point else Path(self.arm, name)

    def __str__(self) -> str:
        point = "".join(f" {key}={_label(value)}" for key, value in self.tune)
        return f"{self.arm}{point} seed {self.seed}" + (" again" if self.repeat > 1 else "")


def _label(value: Any) -> str:
    return value.replace("/", "_") if isinstance(value, str) else shown(value)


@dataclass
class Plan:
    """All runs of a question on ``gpus`` processes. ``overrides`` are the words typed for every run."""

    guarded: Guarded
    runs: list[Run]
    gpus: int
    overrides: list[str]

    @property
    def question(self) -> Question:
        return self.guarded.question

    def command(self, run: Run, folder: Path) -> list[str]:
        """The command that trains one run: torchrun for several processes, plain python for one."""
        launcher = [sys.executable]
        if self.gpus > 1:
            launcher += ["-P", "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.gpus}"]
        tuned = [word for key, value in run.tune for word in (f"--{key}", _label(value))]
        return [
            *launcher,
            os.environ.get("ABLATION_TRAINER") or str(ROOT / "train.py"),
            "--job.config_file",
            str(self.question.path),
            *("--ablation.arm", run.arm, "--debug.seed", str(run.seed), "--job.run_dir", str(folder / run.place)),
            *tuned,
            *self.overrides,
        ]

    def configuration(self, run: Run) -> dict[str, Any]:
        """Full key -> value that the run's config.toml must hold."""
        overrides = {**command_line.parse(self.overrides).leaves, **dict(run.tune), "debug.seed": run.seed}
        return flatten(load_file(self.question.path, overrides, run.arm).config)

    def choose(self, arms: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """The runs of these arms and seeds; an empty list means all.

        Raises:
            ConfigError: an arm or a seed that is not planned.
        """
        known_arms, known_seeds = list(self.guarded.arms), sorted({run.seed for run in self.runs})
        for arm in arms:
            if arm not in known_arms:
                raise ConfigError(
                    f"--arms {arm}: no such arm in {relative(self.question.path)}{guess(arm, known_arms)}"
                )
        for seed in seeds:
            if seed not in known_seeds:
                listed = ", ".join(map(str, known_seeds))
                raise ConfigError(
                    f"--seeds {seed}: not a seed of {relative(self.question.path)}, which plans {listed}; "
                    "to have more, add them to ablation.seeds"
                )
        return [r for r in self.runs if (not arms or r.arm in arms) and (not seeds or r.seed in seeds)]


def plan(guarded: Guarded, gpus: int = 1, overrides: Sequence[str] = ()) -> Plan:
    """Every run of a guarded question, in order of execution."""
    question, table = guarded.question, guarded.question.table
    points: list[Point] = [tuple(zip(table.tune, values, strict=True)) for values in product(*table.tune.values())]
    middle = points[len(points) // 2]
    runs: list[Run] = []
    for position, seed in enumerate(table.seeds):
        block = [Run(0, arm, seed, gpus, tune=point) for arm in guarded.arms for point in points]
        if table.aa:
            block += [
                Run(0, table.baseline, seed, gpus, repeat=2, tune=middle),
                Run(0, table.baseline, question.aa_seeds[position], gpus, tune=middle),
            ]
        runs += reversed(block) if position % 2 else block
    numbered = [Run(i, r.arm, r.seed, r.gpus, r.repeat, r.tune) for i, r in enumerate(runs, start=1)]
    return Plan(guarded, numbered, gpus, list(overrides))


def check_processes(question: Question, gpus: int, anywhere: bool) -> None:
    """Refuse a number of processes that the question is not meant for.

    Raises:
        ConfigError: with the numbers that it is meant for.
    """
    meant = question.table.runs_on.get("gpus", [])
    if meant and gpus not in meant and not anywhere:
        raise ConfigError(
            f"{relative(question.path)}: runs_on.gpus = {meant}, but this is NGPU={gpus}; set NGPU to one of them, "
            "or give --anywhere"
        )


def check_files(chosen: Plan) -> None:
    """Refuse to start when a file or folder that a run will read is not there.

    Raises:
        ConfigError: naming it and its key.
    """
    for arm in chosen.guarded.arms.values():
        paths.check_files(arm.resolved.config, arm.resolved.origins)


def folders(question: Question, root: Path) -> list[Path]:
    """The folders of a question's results that exist under ``root``, oldest first: name, name-2, name-3, ..."""
    numbered = [(1, root / question.name)]
    for path in root.glob(f"{question.name}-*"):
        number = path.name.removeprefix(f"{question.name}-")
        if number.isdecimal() and int(number) > 1:
            numbered.append((int(number), path))
    return [path for _, path in sorted(numbered) if path.is_dir()]


def folder_for(chosen: Plan, new: bool) -> Path:
    """Where the runs go: the newest folder of the question, or with ``new`` the one after it.

    Raises:
        ConfigError: the newest folder holds runs of another version of the question, and ``new`` is not set.
    """
    question = chosen.question
    root = Path(next(iter(chosen.guarded.arms.values())).resolved.config.job.dump_folder)
    existing = folders(question, root)
    if not existing:
        return root / question.name
    if new:
        number = existing[-1].name.removeprefix(question.name).removeprefix("-") or "1"
        return root / f"{question.name}-{int(number) + 1}"
    check_folder(chosen, existing[-1])
    return existing[-1]


def check_folder(chosen: Plan, folder: Path) -> None:
    """Refuse a folder with a run that this plan would not make: another value of a key, or an arm that is gone.

    Raises:
        ConfigError: naming the run and the key.
    """
    fix = "Take the change back, or give --new to leave these results as they are and start a new folder."
    for record in sorted(folder.glob("*/**/run.json")):
        arm = record.relative_to(folder).parts[0]
        if arm not in chosen.guarded.arms:
            raise ConfigError(f"{folder}: holds runs of arm {shown(arm)}, which the question no longer has. {fix}")
    for run in chosen.runs:
        kept = folder / run.place / "config.toml"
        if not kept.is_file():
            continue
        try:
            before = flatten(load_file(kept).config)
        except ConfigError as error:
            raise ConfigError(f"{error}\n{folder}: this version cannot read the runs that are there. {fix}") from None
        for key, (was, now) in changed(before, chosen.configuration(run)).items():
            raise ConfigError(f"{folder / run.place}: was run with {key} = {shown(was)}, now {shown(now)}. {fix}")
