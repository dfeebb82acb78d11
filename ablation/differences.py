"""How two configurations differ, and which changed key each change follows from."""

from __future__ import annotations

from functools import reduce
from typing import Any

from config.keys import companions, matters

Values = dict[str, Any]
Changes = dict[str, tuple[Any, Any]]

NAMING_KEYS = ("job.run_dir", "job.config_file", "job.dry_run", "job.description", "job.dump_folder")
"""Keys that name a run and change nothing in it."""


def changed(before: Values, after: Values) -> Changes:
    """Keys that differ and have an effect on at least one side, with both values; what only names a run is left out."""
    return {
        key: (before[key], after[key])
        for key in after
        if before[key] != after[key] and key not in NAMING_KEYS and not (is_inert(key, before) and is_inert(key, after))
    }


def is_inert(key: str, flat: Values) -> bool:
    """Whether a key has no effect, because its parent (or its parent's) has another value than it needs."""
    if key not in companions():
        return False
    parent, values = companions()[key]
    return not matters(flat[parent], values) or is_inert(parent, flat)


def ancestry(key: str) -> list[str]:
    """The key, its parent, its parent's parent, ..."""
    chain = [key]
    while chain[-1] in companions():
        chain.append(companions()[chain[-1]][0])
    return chain


def root_of(key: str, difference: Changes) -> str:
    """The changed key that a change follows from: itself, or the first of its unbroken line of changed ancestors."""
    return reduce(lambda root, above: above if above in difference else root, ancestry(key), key)
