"""Checks that both sides are the same thing but for the variable: configuration, data, seeds, host, versions,
commit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ablation.differences import is_inert
from ablation.runs import Run, config_difference
from ablation.sides import Item, Part, Sides, Status, declared_variables, listed
from config.keys import all_keys
from config.keys import companions as companion_parents

TOKENS_A_STEP_KEYS = frozenset({"training.global_batch_size", "training.seq_len"})
# What environment.json says about the place and the source; all else in it are versions and settings.
NO_VERSIONS = frozenset({"hostname_hash", "gpu_name", "cpu", "clocks", "deterministic"})


def companions(keys: Iterable[str]) -> set[str]:
    """Keys that the schema declares inert unless one of ``keys`` (or a companion of one) holds some value."""
    parents = {key: parent for key, (parent, _) in companion_parents().items()}
    followers: set[str] = set()
    wave = set(keys)
    while wave:
        wave = {key for key, parent in parents.items() if parent in wave} - followers
        followers |= wave
    return followers


def effective_difference(baseline: Run, candidate: Run) -> dict[str, tuple[Any, Any]]:
    """``config_difference`` without keys that have no effect on either side because of their parents' values."""
    defaults = {name: key.default for name, key in all_keys().items()}
    sides = [defaults | run.config for run in (baseline, candidate)]
    pairs = config_difference(baseline, candidate)
    return {key: pair for key, pair in pairs.items() if not all(is_inert(key, side) for side in sides)}


def moved_settings(old: Run, new: Run) -> list[str]:
    """What keeps two runs of one arm, made at different times, from being the same: keys, where an absent one has its
    default, and the corpus.
    """
    defaults = {name: key.default for name, key in all_keys().items()}
    before, after = defaults | old.config, defaults | new.config
    moved = [key for key in config_difference(old, new) if before.get(key) != after.get(key)]
    return moved + ["the corpus"] * (old.record.get("corpus_hash") != new.record.get("corpus_hash"))


def change_of(sides: Sides) -> tuple[set[str], set[str], list[str]]:
    """Keys the candidate changes, those that follow (companions, tuned and held keys), and what is wrong with
    them.
    """
    question, base, candidate = sides.question, sides.baseline[0], sides.candidate[0]
    tuned, held = set(question.get("tune") or {}), dict(question.get("hold") or {})
    wrong = [told for side in (sides.baseline, sides.candidate) if (told := _differ(side, tuned))]
    changed = set(effective_difference(base, candidate))
    variables = set(declared_variables(question))
    followers = changed & (companions(variables or changed) | tuned | set(held)) - variables
    if not variables:
        followers = {key for key in changed if key in companions(changed - {key})}
    roots = changed - followers
    if variables and roots - variables:
        wrong.append(
            f"{listed(sorted(roots - variables))} changed too, and only {listed(sorted(variables))} is declared"
        )
    elif variables and not changed:
        wrong.append(f"{candidate.arm} is configured exactly like the baseline")
    elif not variables and len(roots) > 1:
        wrong.append(f"{len(roots)} keys differ: {listed(sorted(roots))}")
    for key, quantity in held.items():
        values = [_held_quantity(quantity, run) for run in (base, candidate)]
        if values[0] != values[1]:
            wrong.append(f"{key} should hold {quantity}, and it went {values[0]} -> {values[1]}")
    return roots, followers, wrong


def _differ(runs: Sequence[Run], tuned: set[str]) -> str:
    """What is wrong with runs of one arm that should be configured alike; empty if nothing."""
    odd = {key for run in runs for key in config_difference(runs[0], run)} - tuned
    return f"runs of {runs[0].arm} differ among themselves in {listed(sorted(odd))}" if odd else ""


def _held_quantity(name: str, run: Run) -> Any:
    """A quantity that ``hold`` may name, from what the run recorded; None if it cannot be told."""
    config, recorded = run.config, run.record.get("derived") or {}
    products: dict[str, tuple[Any, ...]] = {
        "tokens_per_step": (run.tokens_per_step,),
        "global_batch_size": (config.get("training.global_batch_size"),),
        "tokens": (run.tokens_per_step, config.get("training.steps")),
        "warmup_tokens": (run.tokens_per_step, config.get("lr_scheduler.warmup_steps")),
        "micro_batch_tokens": (config.get("training.local_batch_size"), config.get("training.seq_len")),
        "validation_tokens": (
            config.get("validation.steps"),
            config.get("validation.local_batch_size"),
            recorded.get("data_parallel_degree"),
            config.get("training.seq_len"),
        ),
    }
    factors = products.get(name, (recorded.get(name),))
    return None if None in factors or -1 in factors else math.prod(factors)


def nothing_changed(sides: Sides) -> Item:
    """For the baseline against itself, in place of ``one_variable``."""
    wrong = _differ(sides.runs, set())
    return Item("nothing changed", "INVALID" if wrong else "ok", wrong)


def one_variable(sides: Sides) -> Item:
    """The candidate changes the declared variable and what may follow it."""
    roots, followers, wrong = change_of(sides)
    if wrong:
        return Item("one variable changed", "INVALID", "; ".join(wrong))
    note = f" (with it: {listed(sorted(followers))})" if followers else ""
    return Item("one variable changed", "ok", (listed(sorted(roots)) or "number of devices") + note)


def _same(
    name: str,
    sides: Sides,
    of: Callable[[Run], Any],
    status: Status,
    spoils: tuple[Part, ...] = ("loss", "speed"),
    show: Callable[[Any], str] = str,
) -> Item:
    """All runs of the comparison agree on ``of(run)``."""
    values: dict[str, tuple[Any, Run]] = {}
    for run in sides.runs:
        value = of(run)
        values.setdefault(repr(value), (value, run))
    if any(value in (None, "", {}) for value, _ in values.values()):
        return Item(name, "warning", "not recorded by every run")
    if len(values) > 1:
        told = listed(f"{show(value)} in {run.name}" for value, run in values.values())
        return Item(name, status, told, spoils)
    return Item(name, "ok", show(next(iter(values.values()))[0]))


def _short(value: Any) -> str:
    return str(value)[:12]


def _corpus(sides: Sides) -> Item:
    return _same("same corpus", sides, lambda run: run.record.get("corpus_hash"), "INVALID", show=_short)


def _tokenizer(sides: Sides) -> Item:
    def show(value: Any) -> str:
        named = value if isinstance(value, dict) else {}
        return listed(
            f"{k} {_short(v)}" for k, v in named.items() if k in ("name", "kind", "vocab_size", "fingerprint")
        )

    return _same("same tokenizer", sides, lambda run: run.record.get("tokenizer"), "INVALID", show=show)


def _tokens_a_step(sides: Sides) -> Item:
    item = _same("same tokens a step", sides, lambda run: run.tokens_per_step, "INVALID", show=lambda v: f"{v:,}")
    followed = TOKENS_A_STEP_KEYS & set(declared_variables(sides.question))
    if item.status == "INVALID" and followed:
        return Item(item.name, "ok", f"follows {listed(sorted(followed))}: compared at equal tokens ({item.reason})")
    return item


def _held_out_windows(sides: Sides) -> Item:
    name = "same held-out windows"
    if len({run.config.get("training.seq_len") for run in sides.runs}) > 1:
        return Item(name, "warning", "validation windows are training.seq_len long: losses average over other contexts")
    return Item(name, "ok")


def seeds(sides: Sides) -> Item:
    """The same seeds on both sides, and all that were asked for."""
    name = "same seeds on both sides"
    base, candidate = ([run.seed for run in side] for side in (sides.baseline, sides.candidate))
    shared = [seed for seed in candidate if seed in base]
    if not shared:
        return Item(name, "unpaired", f"baseline {listed(base)}; {sides.candidate[0].arm} {listed(candidate)}")
    asked = {str(seed) for seed in sides.question.get("seeds") or []}
    alone = [f"{seed} only in {sides.candidate[0].arm}" for seed in candidate if seed not in base]
    alone += [f"{seed} only in {sides.baseline[0].arm}" for seed in base if seed not in candidate]
    alone += [f"{seed} asked for and missing" for seed in sorted(asked - set(base) - set(candidate))]
    if alone:
        return Item(name, "INVALID", f"seed {listed(alone)}: a missing seed may be missing for a reason")
    if twice := _twice(sides.baseline) + _twice(sides.candidate):
        return Item(name, "INVALID", f"{listed(twice)}: only one of two runs can be the pair; leave one directory out")
    return Item(name, "ok", listed(shared))


def _twice(side: Sequence[Run]) -> list[str]:
    """Seeds that one side holds more than once, as when two directories of one question are given."""
    counts = Counter((run.seed, run.repeat) for run in side)
    return [f"seed {seed} is {count} times in {side[0].arm}" for (seed, _), count in counts.items() if count > 1]


def _over_pairs(sides: Sides) -> list[tuple[Run, Run]]:
    return sides.pairs or [(base, candidate) for base in sides.baseline for candidate in sides.candidate]


def _host(sides: Sides) -> Item:
    name = "same host and device model"
    keys = ("hostname_hash", "gpu_name", "cpu")
    known = [run for run in sides.runs if run.environment.get("hostname_hash")]
    if len(known) < len(sides.runs):
        return Item(name, "warning", "not recorded by every run")
    odd = {
        f"seed {c.seed}: {key} {b.environment.get(key)} and {c.environment.get(key)}"
        for b, c in _over_pairs(sides) for key in keys if b.environment.get(key) != c.environment.get(key)
    }  # fmt: skip
    if odd:
        return Item(name, "unpaired", "; ".join(sorted(odd)))
    first = sides.baseline[0].environment
    return Item(
        name, "ok", f"{first.get('gpu_name') or first.get('cpu') or 'CPU'}, host {_short(first['hostname_hash'])}"
    )


def _versions(sides: Sides) -> Item:
    name = "same versions and environment variables"
    odd = set()
    for b, c in _over_pairs(sides):
        for key in sorted(b.environment.keys() | c.environment.keys()):
            if key in NO_VERSIONS or key.startswith("git_"):
                continue
            mine, other = b.environment.get(key), c.environment.get(key)
            if mine != other:
                odd.add(f"seed {c.seed}: {key} {mine} and {other}")
    if odd:
        return Item(name, "unpaired", "; ".join(sorted(odd)))
    first = sides.baseline[0].environment
    return Item(
        name, "ok" if first else "warning", listed(f"{k} {first[k]}" for k in ("torch", "cuda") if first.get(k))
    )


def _commit(sides: Sides) -> Item:
    name = "same commit, clean tree"
    for b, c in _over_pairs(sides):
        commits = b.environment.get("git_commit"), c.environment.get("git_commit")
        if commits[0] != commits[1]:
            return Item(name, "unpaired", f"seed {c.seed}: {_short(commits[0])} and {_short(commits[1])}")
        if b.patch_hash != c.patch_hash or bool(b.environment.get("git_dirty")) != bool(c.environment.get("git_dirty")):
            return Item(name, "unpaired", f"seed {c.seed}: uncommitted changes differ between the sides")
    first = sides.baseline[0]
    if not first.environment.get("git_commit"):
        return Item(name, "warning", "commit not recorded")
    if first.environment.get("git_dirty"):
        return Item(
            name, "warning", "the same uncommitted changes on both sides (dirty.patch); commit before publishing"
        )
    return Item(name, "ok", _short(first.environment["git_commit"]))


CHECKS = (one_variable, _corpus, _tokenizer, _tokens_a_step, _held_out_windows, seeds, _host, _versions, _commit)
