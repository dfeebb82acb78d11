"""The one-variable guard: arms differ in what the file declares, in its companions, and in nothing else.

Resolved configurations are compared, so a change is found wherever it comes from: base, file, arm or command line. A
difference is explained from its *roots*, the changed keys whose parent key (config/schema.py) did not change: one a
written arm, a declared variable or a companion of one. Keys without effect on either side are no difference. Quantities
that follow from the keys and the number of processes (derived.py) are listed apart, and refused only where ``hold``
promises that they stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, product

from ablation.derived import QUANTITIES, derived
from ablation.differences import Changes, Values, ancestry, changed, is_inert, root_of
from ablation.question import Question, guess, relative, without_path
from config.errors import ConfigError
from config.keys import all_keys, checked, companions, shown, unknown_key
from config.load import Resolved, flatten, load_file
from config.world import smallest_world

RUNNER_KEYS = ("debug.seed", "job.run_dir", "job.config_file", "job.dry_run")
"""Set by the runner for each run; no arm and no override may touch them."""


@dataclass
class Arm:
    """An arm that runs. Each dict maps a key to (value in the baseline, value here)."""

    name: str
    resolved: Resolved
    flat: Values
    changes: Changes = field(default_factory=dict)
    companions: Changes = field(default_factory=dict)
    held: Changes = field(default_factory=dict)
    derived: Changes = field(default_factory=dict)


@dataclass
class Guarded:
    """A question with its arms resolved. Without violations it may run; ``arms`` starts with the baseline."""

    question: Question
    arms: dict[str, Arm] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def message(self) -> str:
        """Every violation, a line each, led by the file."""
        return "\n".join(f"{relative(self.question.path)}: {violation}" for violation in self.violations)

    def accepted(self) -> Guarded:
        """Itself.

        Raises:
            ConfigError: with every violation, if there is one.
        """
        if self.violations:
            raise ConfigError(self.message())
        return self


def guard(question: Question, overrides: Values | None = None, world_size: int | None = None) -> Guarded:
    """Resolve every arm and find every violation.

    Args:
        overrides: full key -> value from the command line, laid over every arm.
        world_size: processes a run; None: the smallest that ``runs_on`` names, else the fewest that the arms allow.
    """
    overrides = overrides or {}
    result = Guarded(question, violations=list(question.violations))
    if question.readable and question.table.baseline in question.arms:
        found = [*_about_keys(question, overrides), *_resolve(result, overrides)]
        if all(name in result.arms for name in _names_of_arms(question)):
            found += _about_overrides(result, overrides) or [
                *_derive(result, world_size), *_about_arms(result), *_about_values(result)
            ]  # fmt: skip
        result.violations += found
    result.violations = list(dict.fromkeys(result.violations))
    return result


def _about_keys(question: Question, overrides: Values) -> Iterator[str]:
    """Names of keys in the [ablation] table and on the command line."""
    table = question.table
    for where, names in (("variable", question.variables), ("tune", list(table.tune)), ("hold", list(table.hold))):
        for name in names:
            if name not in all_keys():
                yield f"ablation.{where}: {shown(name)}: {unknown_key(name, all_keys())}"
            elif name in RUNNER_KEYS:
                yield f"ablation.{where}: {shown(name)}: set by the runner for each run, never by a question"
    for name in {*table.tune, *table.hold} & {*question.variables}:
        yield f"ablation: {shown(name)} is the variable; it can be neither tuned nor held"
    for name, quantity in table.hold.items():
        if quantity not in QUANTITIES:
            known = guess(quantity, list(QUANTITIES))
            yield f"ablation.hold.{shown(name)} = {shown(quantity)}: unknown quantity{known}"
    for name, grid in table.tune.items():
        if not isinstance(grid, list) or len(grid) < 2 or len({shown(v) for v in grid}) < len(grid):
            yield f"ablation.tune.{shown(name)} = {shown(grid)}: expected a list of two or more different values"
            continue
        for value in grid if name in all_keys() else []:
            try:
                checked(all_keys()[name], value)
            except ValueError as error:
                yield f"ablation.tune.{shown(name)}: {shown(value)}: {error}"
        for arm, leaves in question.arms.items():
            if name in leaves:
                yield f"arms.{arm}: sets {name}, which is tuned: every arm is run on the same grid"
    for name in overrides:
        if name in RUNNER_KEYS:
            yield f"command line: --{name}: set by the runner for each run"
        elif name in table.tune:
            yield f"command line: --{name}: ablation.tune gives its values; change them in the file"


def _resolve(result: Guarded, overrides: Values) -> Iterator[str]:
    """Resolve every arm that runs; fills ``result.arms``, baseline first."""
    question = result.question
    for name in _names_of_arms(question):
        try:
            resolved = load_file(question.path, overrides, name)
        except ConfigError as error:
            yield from without_path(error, question.path)
            continue
        result.arms[name] = Arm(name, resolved, flatten(resolved.config))


def _derive(result: Guarded, world_size: int | None) -> Iterator[str]:
    """Fill every arm's derived changes."""
    configs = {name: arm.resolved.config for name, arm in result.arms.items()}
    gpus = result.question.table.runs_on.get("gpus", [])
    world_size = world_size or min(gpus, default=max(smallest_world(config) for config in configs.values()))
    numbers: dict[str, Values] = {}
    refused: dict[str, str] = {}
    for name, config in configs.items():
        try:
            numbers[name] = derived(config, world_size)
        except ConfigError as mistake:
            refused[name] = str(mistake)
    for name, error in refused.items():  # what is wrong with every arm is said once
        where = "" if len(set(refused.values())) == 1 and not numbers else f"arms.{name} "
        yield f"{where}with NGPU={world_size}: {error}"
    before = numbers.get(result.question.table.baseline, {})
    for name, after in numbers.items():
        result.arms[name].derived = {key: (before[key], after[key]) for key in before if before[key] != after[key]}


def _names_of_arms(question: Question) -> list[str]:
    """The arms that run, baseline first. References are never combined."""
    table = question.table
    plain = [name for name in question.arms if name != table.baseline and name not in table.references]
    references = [name for name in question.arms if name in table.references and name != table.baseline]
    if table.design == "ladder":
        plain = ["+".join(plain[:end]) for end in range(1, len(plain) + 1)]
    elif table.design == "factorial":
        sets = {name: [v for v in question.variables if v in question.arms[name]] for name in plain}
        groups = [[name for name in plain if sets[name] == [variable]] for variable in question.variables]
        grouped = {n for group in groups for n in group}
        combined = [
            "+".join(chosen)
            for count in range(2, len(groups) + 1)
            for some in combinations(groups, count)
            for chosen in product(*some)
        ]
        plain = [*(n for n in plain if n not in grouped), *(n for g in groups for n in g), *combined]
    return list(dict.fromkeys([table.baseline, *plain, *references]))


def _about_arms(result: Guarded) -> Iterator[str]:
    """What each arm changes."""
    question, table = result.question, result.question.table
    baseline = result.arms[table.baseline]
    changed_before: set[str] = set()
    previous = baseline
    for arm in result.arms.values():
        if arm is baseline:
            continue
        composed, against = "+" in arm.name and arm.name not in question.arms, baseline
        if table.design == "ladder" and arm.name not in table.references:
            against, previous = previous, arm
        difference, moved = changed(against.flat, arm.flat), changed(baseline.flat, arm.flat)
        arm.held = {key: pair for key, pair in moved.items() if key in table.hold}
        followers = {key for key in moved if key not in table.hold and root_of(key, moved) != key}
        arm.companions = {key: moved[key] for key in moved if key in followers}
        arm.changes = {k: pair for k, pair in moved.items() if k not in followers and k not in table.hold}
        for key, quantity in table.hold.items():
            if quantity in arm.derived:
                before, after = arm.derived[quantity]
                yield f"arms.{arm.name}: {quantity} {before} -> {after}, but ablation.hold has {key} keep it equal"
        if composed and table.design == "factorial":
            continue  # each part is judged by itself
        yield from _judge(arm.name, difference, question, against.name)
        if table.design == "ladder":
            roots = {root_of(key, difference) for key in difference if key not in table.hold}
            for key in sorted(roots & changed_before):
                yield f"arms.{arm.name}: changes {key} again; each arm of a ladder adds another key"
            changed_before |= roots
    for one, other in combinations(result.arms.values(), 2):
        if other is not baseline and one is not baseline and not changed(one.flat, other.flat):
            yield f"arms.{other.name}: the same configuration as arm {shown(one.name)}"
    for name, leaves in question.arms.items():
        for key in leaves if name in result.arms else []:
            if is_inert(key, result.arms[name].flat):
                parent = companions()[key][0]
                yield f"arms.{name}: {key} has no effect while {parent} = {shown(result.arms[name].flat[parent])}"
    if table.design:
        unused = set(question.variables) - {key for arm in result.arms.values() for key in arm.changes}
        for key in sorted(unused & set(all_keys())):
            yield f"ablation.variable: no arm changes {key}"


def _judge(name: str, difference: Changes, question: Question, against: str) -> Iterator[str]:
    """An arm against the one it is compared with: one root, and a declared one."""
    free = {key: pair for key, pair in difference.items() if key not in question.table.hold}
    if not free:
        what = "the baseline" if against == question.table.baseline else "arm"
        yield f"arms.{name}: equal to {what} {shown(against)}"
        return
    roots = list(dict.fromkeys(root_of(key, free) for key in free))
    foreign = [key for key in roots if not set(ancestry(key)) & set(question.variables)]
    listed = ", ".join(f"{key}: {shown(free[key][0])} -> {shown(free[key][1])}" for key in roots)
    if len(roots) > 1:
        yield f"arms.{name}: changes {len(roots)} keys against {shown(against)} ({listed}); an ablation changes one"
    for key in foreign:
        declared = ", ".join(question.variables) or "nothing"
        before, after = free[key]
        yield (
            f"arms.{name}: changes {key} ({shown(before)} -> {shown(after)}), which is not declared: "
            f"ablation.variable is {declared}"
        )


def _about_overrides(result: Guarded, overrides: Values) -> list[str]:
    """An override must reach every arm: neither overwrite what an arm is, nor act in some arms only. What else is
    wrong then follows from it and is not looked for.
    """
    question, found = result.question, []
    for key in overrides:
        setters = [name for name, leaves in question.arms.items() if key in leaves]
        deaf = [arm.name for arm in result.arms.values() if is_inert(key, arm.flat)]
        if key in question.variables or setters:
            by = f"arm {shown(setters[0])} sets it" if setters else "it is the variable"
            found.append(
                f"command line: --{key}: {by}; an override must reach every arm alike. Change the file instead"
            )
        elif deaf and len(deaf) < len(result.arms):
            found.append(
                f"command line: --{key}: has no effect in arm {shown(deaf[0])}; an override must reach every arm. "
                "Set it in the arms that it is meant for"
            )
    return found


def _about_values(result: Guarded) -> Iterator[str]:
    """Values that no ablation may have, and a decision that every arm reaches."""
    decide = result.question.table.decide
    for arm in result.arms.values():
        flat = arm.flat
        steps = flat["training.steps"]
        if flat["training.global_batch_size"] == -1:
            yield (
                "training.global_batch_size is unset (-1: it would follow the number of processes and change the "
                f"experiment with the mesh); set it, for example to {flat['training.local_batch_size']}"
            )
        if flat["debug.init_seed"] is not None and flat["debug.data_seed"] is not None:
            yield "debug.init_seed and debug.data_seed are both set: every seed would be the same run; unset one"
        if decide.step > steps:
            yield f"ablation.decide.step = {decide.step}: beyond training.steps = {steps}; use {steps}, or 0 (the last)"
            continue
        on_validation = decide.metric.startswith("validation_metrics/")
        if on_validation and not flat["validation.enable"]:
            yield f"ablation.decide.metric = {shown(decide.metric)}: needs validation.enable = true"
        key = "validation.freq" if on_validation else "metrics.log_freq"
        if decide.step % flat[key] and decide.step != steps:
            below = decide.step // flat[key] * flat[key]
            near = [step for step in (below, min(below + flat[key], steps)) if step]
            yield (
                f"ablation.decide.step = {decide.step}: {decide.metric} is measured every {key} = {flat[key]} steps; "
                f"use {' or '.join(map(str, near))}"
            )
