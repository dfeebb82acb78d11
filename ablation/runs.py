"""Run directories, as the trainer leaves them, read into memory. The comparison has no other source.

```
<run_dir>/config.toml  run.json  environment.json  metrics.jsonl  [dirty.patch]  [evaluations/]  [DONE | FAILED]
          [attempts/<n>/]
```
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ablation.differences import NAMING_KEYS
from ablation.held_out import Series, read_evaluations
from ablation.run_files import flatten, merged_lines, read_object
from config.errors import ConfigError

# Keys that name a run or its luck, and not what is trained.
HIDDEN_KEYS = frozenset(NAMING_KEYS) | {"debug.seed", "debug.init_seed", "debug.data_seed", "debug.noise_seed"}
TRAIN_LOSS = "loss_metrics/global_avg_loss"
VALIDATION_LOSS = "validation_metrics/loss"

_DIRECTORY = re.compile(r"seed(?P<seed>\d+)-(?P<gpus>\d+)gpu(?:-repeat(?P<repeat>\d+))?$")


@dataclass(frozen=True)
class Run:
    """One run directory. ``config`` is flat (full key -> value); ``lines`` are metrics.jsonl's objects, one a
    step.
    """

    path: Path
    config: dict[str, Any]
    record: dict[str, Any]
    environment: dict[str, Any]
    lines: list[dict[str, Any]]
    state: str  # "DONE", "FAILED" or "unfinished" (running, or killed)
    finish: dict[str, Any]
    patch_hash: str
    arm: str
    attempts: int = 0
    repeat: int = 0
    tune: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, Series] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Arm and directory, short enough for a table."""
        return f"{self.arm}/{self.path.name}" if self.path.name != self.arm else self.path.name

    @property
    def ablation(self) -> str:
        """Name of the ablation the run belongs to; empty for a plain run."""
        return str((self.record.get("ablation") or {}).get("name", ""))

    @property
    def question(self) -> dict[str, Any]:
        """The ablation file's [ablation] table as it stood when the run started; empty for a plain run."""
        return (self.record.get("ablation") or {}).get("question") or {}

    @property
    def seed(self) -> str:
        """The seeds as one label: "3" where all agree, else "init 3 data 5". Runs pair on it."""
        seeds = {name.removesuffix("_seed"): value for name, value in sorted(self.record.get("seeds", {}).items())}
        if len(set(seeds.values())) == 1:
            return str(next(iter(seeds.values())))
        return " ".join(f"{name} {value}" for name, value in seeds.items())

    @property
    def world_size(self) -> int:
        """Processes, one a device."""
        return int(self.record.get("world_size", 1))

    @property
    def tokens_per_step(self) -> int:
        """Unique tokens of one optimizer step over all devices."""
        return int(self.record["tokens_per_step"])

    @cached_property
    def fill_rate(self) -> float:
        """Share of all positions that held a token of a document; 1 where nothing was padded."""
        shares = [(len(line.get("step_times_s") or []), line.get("data/fill_rate", 1.0)) for line in self.lines]
        steps = sum(count for count, _ in shares)
        return sum(count * share for count, share in shares) / steps if steps else 1.0

    @property
    def started(self) -> str:
        """ISO time of the start; sorts as text."""
        return str(self.record.get("started", ""))

    @cached_property
    def identity(self) -> tuple[tuple[str, str], ...]:
        """The resolved configuration without seeds and names: equal for runs of one arm."""
        items = ((key, json.dumps(value, sort_keys=True)) for key, value in self.config.items())
        return tuple(sorted(item for item in items if item[0] not in HIDDEN_KEYS))

    def series(self, tag: str) -> list[tuple[int, float]]:
        """(step, value) of every line that holds the tag, in order. Not-a-number values are kept."""
        if tag in self.evaluations:
            return self.evaluations[tag]
        return [(int(line["step"]), float(line[tag])) for line in self.lines if line.get(tag) is not None]

    def lines_of(self, name: str) -> list[dict[str, Any]]:
        """The lines of another file of one object a step, as those of metrics.jsonl; empty without the file."""
        return merged_lines(self.path, name)

    @cached_property
    def step_times(self) -> dict[int, float]:
        """Seconds of every step that was timed, excluded ones too."""
        times: dict[int, float] = {}
        for line in self.lines:
            seconds = line.get("step_times_s") or []
            first = int(line["step"]) - len(seconds) + 1
            times.update({first + i: float(s) for i, s in enumerate(seconds)})
        return times

    @cached_property
    def excluded_steps(self) -> frozenset[int]:
        """Steps whose time holds compilation, warm-up, a checkpoint, validation or profiling."""
        return frozenset(int(step) for line in self.lines for step in line.get("excluded_steps") or [])

    @cached_property
    def steady_times(self) -> list[float]:
        """Seconds of the steps that count for throughput."""
        return [seconds for step, seconds in sorted(self.step_times.items()) if self.counts(step)]

    def counts(self, step: int) -> bool:
        """Whether a timed step is not excluded, and its time is one (health.py complains about those that are
        not).
        """
        return step not in self.excluded_steps and 0.0 < self.step_times[step] < math.inf


def read_run(path: Path) -> Run:
    """Read one run directory.

    Raises:
        ConfigError: run.json or config.toml is missing or broken, or a line of metrics.jsonl is.
    """
    record = read_object(path / "run.json")
    missing = [key for key in ("tokens_per_step", "seeds", "world_size") if key not in record]
    if missing:
        raise ConfigError(
            f"{path / 'run.json'}: {', '.join(missing)} missing; this is no run directory of this trainer"
        )
    try:
        config = flatten(tomllib.loads((path / "config.toml").read_text(encoding="utf-8")))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path / 'config.toml'}: {error}; a run without its configuration cannot be compared"
        ) from None
    state, finish = "unfinished", {}
    for candidate in ("FAILED", "DONE"):
        if (path / candidate).exists():
            state, finish = candidate, read_object(path / candidate)
    entry = record.get("ablation") or {}
    patch = path / "dirty.patch"
    place = _DIRECTORY.match(path.name)
    attempts = path / "attempts"
    return Run(
        path=path,
        config=config,
        record=record,
        environment=read_object(path / "environment.json"),
        lines=merged_lines(path),
        state=state,
        finish=finish,
        patch_hash=hashlib.sha256(patch.read_bytes()).hexdigest() if patch.exists() else "",
        arm=str(entry.get("arm", "")),
        attempts=len(list(attempts.iterdir())) if attempts.is_dir() else 0,
        repeat=int(place["repeat"] or 0) if place else 0,
        tune=dict(entry.get("tune") or {}),
        evaluations=read_evaluations(path),
    )


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Every run in the given directories, each a run directory or a folder of them at any depth, without duplicates.

    Plain runs (of no ablation) become arms by configuration: one arm for each that differs beyond seeds, named
    after its directory.

    Raises:
        ConfigError: a path does not exist or holds no run.
    """
    found: dict[Path, Run] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path}: no such directory")
        places = []
        for folder, children, files in os.walk(path):
            children.sort()
            if "run.json" in files:
                places.append(Path(folder))
                children.clear()  # attempts/ holds earlier tries of the same run
        if not places:
            raise ConfigError(f"{path}: no run directory in it (a folder with run.json)")
        for place in places:
            found.setdefault(place.resolve(), read_run(place))
    return _name_plain_arms(list(found.values()))


def _name_plain_arms(runs: list[Run]) -> list[Run]:
    names: dict[tuple[Any, ...], str] = {}
    counts: dict[tuple[str, str], int] = {}
    named = []
    for run in runs:
        if run.arm:
            named.append(run)
            continue
        key = (run.identity, run.world_size)
        if key not in names:
            name = run.path.parent.name if _DIRECTORY.match(run.path.name) else run.path.name
            taken = sum(other == name or other.startswith(f"{name} (") for other in names.values())
            names[key] = f"{name} ({taken + 1})" if taken else name
        same = counts.get((names[key], run.seed), 0)
        counts[names[key], run.seed] = same + 1
        named.append(replace(run, arm=names[key], repeat=run.repeat or same))
    return named


def config_difference(baseline: Run, candidate: Run) -> dict[str, tuple[Any, Any]]:
    """Keys whose resolved values differ, seeds and names apart: key -> (baseline's, candidate's); None where
    absent.
    """
    keys = (baseline.config.keys() | candidate.config.keys()) - HIDDEN_KEYS
    pairs = {key: (baseline.config.get(key), candidate.config.get(key)) for key in sorted(keys)}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def derived_difference(baseline: Run, candidate: Run) -> dict[str, tuple[Any, Any]]:
    """Values the trainer computed (mesh, accumulation, parameters, ...) that moved with the change."""
    moved: dict[str, tuple[Any, Any]] = {}
    for table in ("derived", "mesh", "parameters", "flops_per_token"):
        a, b = baseline.record.get(table) or {}, candidate.record.get(table) or {}
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key):
                moved[f"{table}.{key}"] = (a.get(key), b.get(key))
    for key in ("tokens_per_step", "world_size", "attention_backend"):
        if baseline.record.get(key) != candidate.record.get(key):
            moved[key] = (baseline.record.get(key), candidate.record.get(key))
    return moved


def latest_question(runs: Sequence[Run]) -> dict[str, Any]:
    """The [ablation] table of the run that started last: later seeds may have been added to it."""
    return max(runs, key=lambda run: run.started).question
