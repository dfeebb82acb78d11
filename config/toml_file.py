"""Strict reading of TOML files: bases, syntax errors with their place, every leaf by its full key.

This file knows the form of a file. What a key may hold is said by config/keys.py, what torchtitan's keys mean by
config/torchtitan_keys.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from config import torchtitan_keys
from config.errors import ConfigError
from config.keys import Key, all_keys, checked, keys_of, nearest, shown, unknown_key
from config.schema import Ablation


@dataclass
class Document:
    """One TOML file, checked key by key. ``bases`` come before it, in the order in which they are overlaid."""

    path: Path
    leaves: dict[str, Any]
    bases: list[Document] = field(default_factory=list)
    ablation: dict[str, Any] = field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arm name -> {full key: value}, however the file spells it ("a.b" = 1, a.b = 1 or a nested table)."""

    def in_order(self) -> list[Document]:
        """All bases, left to right and deepest first, then this file: later ones overlay earlier ones."""
        return [d for base in self.bases for d in base.in_order()] + [self]


def read(path: str | Path) -> Document:
    """A file and its bases, every key and value checked on its own. Rules between keys are config/rules.py.

    Raises:
        ConfigError: missing file, not TOML (file, line, column), unknown section or key, wrong type, out of range, a
            base that is missing, circular or an ablation. All mistakes of one file are in one message, a line each.
    """
    return _read(Path(path), ())


def _read(path: Path, chain: tuple[Path, ...]) -> Document:
    here = (*chain, path)
    route = " -> ".join(str(p) for p in here)
    if path.resolve() in {p.resolve() for p in chain}:
        raise ConfigError(f"{chain[0]}: base is circular: {route}. Remove one of these base lines.")
    raw = _parse(path, route if chain else "")
    base = raw.pop("base", [])
    names = [base] if isinstance(base, str) else base
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{path}: base = {shown(base)}: expected a file name or a list of file names")
    bases = [_read(path.parent / name, here) for name in names]
    for document in bases:
        if document.arms or document.ablation:
            raise ConfigError(
                f"{path}: base {document.path} is an ablation; a base holds one configuration."
                " Move what both share into a file without [ablation] and [arms]."
            )
    mistakes: list[str] = []
    ablation, arms = _table(raw, "ablation", path, mistakes), _table(raw, "arms", path, mistakes)
    document = Document(path, _checked_leaves(raw, str(path), mistakes), bases)
    document.ablation = _checked_ablation(ablation, str(path), mistakes)
    for name, table in arms.items():
        if isinstance(table, dict):
            document.arms[name] = _checked_leaves(table, f"{path} [arms.{name}]", mistakes)
        else:
            mistakes.append(f"{path}: arms.{name} = {shown(table)}: expected a table of keys, as in [arms.{name}]")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return document


def _parse(path: Path, route: str) -> dict[str, Any]:
    by = f" (base: {route})" if route else ""
    try:
        return tomli.loads(path.read_bytes().decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{by}{_similar_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, not a TOML file{by}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read{by}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8, which TOML requires") from None
    except tomli.TOMLDecodeError as error:
        message = error.msg[:1].lower() + error.msg[1:]
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: not valid TOML: {message}") from None


def _similar_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"; folder {folder} does not exist either"
    found = nearest(path.stem, sorted(p.stem for p in folder.glob("*.toml")))  # without what all of them share
    return f" - did you mean {folder / found}.toml?" if found else ""


def _table(raw: dict[str, Any], name: str, path: Path, mistakes: list[str]) -> dict[str, Any]:
    table = raw.pop(name, {})
    if isinstance(table, dict):
        return table
    mistakes.append(f"{path}: {name} = {shown(table)}: expected a table, as in [{name}]")
    return {}


def leaves_of(tree: dict[str, Any], known: dict[str, Key], prefix: str = "") -> dict[str, Any]:
    """Nested tables as full key -> value. A table stays whole where the schema wants one (``ablation.tune``)."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if isinstance(value, dict) and full not in known:
            flat |= leaves_of(value, known, f"{full}.")
        else:
            flat[full] = value
    return flat


def check_leaf(full: str, value: Any, where: str, written: str = "{}") -> Any:
    """One value against the schema (or, for a key of torchtitan alone, as it is: judged once everything is merged).

    Raises:
        ConfigError: unknown key, wrong type or out of range. ``where`` leads the message.
    """
    key = all_keys().get(full)
    name = written.format(full)
    if key is None:
        if torchtitan_keys.is_known(full):
            return value
        raise ConfigError(f"{where}: {name}: {unknown_key(full, all_keys(), written, torchtitan_keys.names())}")
    try:
        return checked(key, value)
    except ValueError as error:
        raise ConfigError(f"{where}: {name} = {shown(value)}: {error}") from None


def _checked_leaves(tree: dict[str, Any], where: str, mistakes: list[str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    sections = {k.partition(".")[0] for k in all_keys()}
    for full, value in leaves_of(tree, all_keys()).items():
        if "." not in full and full in sections:
            mistakes.append(f"{where}: {full} = {shown(value)}: expected a section, as in [{full}]")
            continue
        if "." not in full:
            homes = [k for k in all_keys() if k.partition(".")[2] == full]
            hint = f" - did you mean '{homes[0]}'?" if homes else "; every key but base stands in a section"
            mistakes.append(f"{where}: {full} = {shown(value)}: a key outside any section{hint}")
            continue
        try:
            flat[full] = check_leaf(full, value, where)
        except ConfigError as error:
            mistakes.append(str(error))
    return flat


def _checked_ablation(table: dict[str, Any], where: str, mistakes: list[str]) -> dict[str, Any]:
    """The [ablation] table itself, unchanged, once every key of it is known and of its type."""
    known = keys_of(Ablation, "ablation.")
    for full, value in leaves_of(table, known, "ablation.").items():
        if full not in known:
            mistakes.append(f"{where}: {full}: {unknown_key(full, known)}")
            continue
        try:
            checked(known[full], value)
        except ValueError as error:
            mistakes.append(f"{where}: {full} = {shown(value)}: {error}")
    return table
