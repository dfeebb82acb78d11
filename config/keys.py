"""The schema as a table of keys, and the one check of a value against its key.

TOML files, the command line and overrides all go through :func:`problem_with`, so a mistake reads the same from each.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import math
import types
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, reduce
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from config import schema


@dataclass(frozen=True)
class Key:
    """One leaf of the schema. ``name`` is the full key ("training.steps")."""

    name: str
    type: Any
    default: Any
    minimum: float | None = None
    maximum: float | None = None
    parent: str = ""
    parent_values: tuple[Any, ...] = ()

    @property
    def optional(self) -> bool:
        """Whether the key may stay unset (None), to be derived from others."""
        return type(None) in get_args(self.type)


@cache
def keys_of(cls: type, prefix: str = "") -> dict[str, Key]:
    """Full key -> :class:`Key` for every leaf of a dataclass, nested dataclasses included, in order of declaration."""
    hints = get_type_hints(cls)
    table: dict[str, Key] = {}
    for f in fields(cls):
        name = f"{prefix}{f.name}"
        kind = hints[f.name]
        if is_dataclass(kind):
            table |= keys_of(kind, f"{name}.")  # type: ignore[arg-type]
            continue
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        table[name] = Key(name, kind, default, **f.metadata)
    return table


@cache
def all_keys() -> dict[str, Key]:
    """Full key -> :class:`Key` for every key of a training configuration."""
    return keys_of(schema.Config)


def value_of(config: Any, full: str) -> Any:
    """The value that a configuration has under a full key."""
    return reduce(getattr, full.split("."), config)


@cache
def companions() -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Companion key -> (parent key, values of the parent for which the companion matters)."""
    return {k.name: (k.parent, k.parent_values) for k in all_keys().values() if k.parent}


def matters(value: Any, wanted: tuple[Any, ...]) -> bool:
    """Whether a companion has an effect while its parent is ``value``: one of ``wanted``, or a list that holds one."""
    return any(value == w or (isinstance(w, list) and w and all(part in value for part in w)) for w in wanted)


@cache
def help_lines() -> dict[str, str]:
    """Full key -> the docstring line under its field in the schema, those of [ablation] included."""
    found: dict[str, str] = {}

    def collect(cls: type, prefix: str) -> None:
        hints, lines = get_type_hints(cls), _lines_under_fields(cls)
        for f in fields(cls):
            if is_dataclass(hints[f.name]):
                collect(hints[f.name], f"{prefix}{f.name}.")
            else:
                found[f"{prefix}{f.name}"] = lines[f.name]

    collect(schema.Config, "")
    collect(schema.Ablation, "ablation.")
    return found


def _lines_under_fields(cls: type) -> dict[str, str]:
    """Field -> the docstring that follows it in the source of the class, on one line."""
    body = cast(ast.ClassDef, ast.parse(inspect.getsource(cls)).body[0]).body
    found = {}
    for statement, following in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            found[cast(ast.Name, statement.target).id] = " ".join(ast.literal_eval(following.value).split())
    return found


def shown(value: Any) -> str:
    """A value as a TOML file spells it: ``true``, ``"text"``, ``[1, 2]``, ``{ a = 1 }``; ``unset`` for None."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_bare_or_quoted(k)} = {shown(v)}" for k, v in value.items()) + " }" if value else "{}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(shown(v) for v in value) + "]"
    return str(value)


def _bare_or_quoted(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that ``word`` was most likely meant to be, or None."""
    choices = list(choices)
    folded = {c.lower(): c for c in choices}
    found = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`` - did you mean "x"?`` or nothing."""
    found = nearest(word, choices)
    return f" - did you mean {shown(found)}?" if found else ""


def expected(kind: Any) -> str:
    """What a type accepts, in words: "an integer", "one of "a", "b"", "a list of strings"."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(expected(a) for a in arguments if a is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(shown(a) for a in arguments)
    if origin is list:
        item = dict if get_origin(arguments[0]) is dict else arguments[0]
        plain = {str: "strings", int: "integers", dict: "tables", Any: "values"}
        return f"a list of {plain[item]}" if item in plain else f"a list, each item {expected(item)}"
    if origin is dict:
        return "a table"
    if kind is Any:
        return "any value"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[kind]


def converted(kind: Any, value: Any) -> Any:
    """``value`` as the type ``kind``; an integer becomes the float where a number is wanted, a bool never a number.

    Raises:
        ValueError: with what was expected, in words.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        choices = [a for a in arguments if a is not type(None)]
        for a in choices[:-1]:
            try:
                return converted(a, value)
            except ValueError:
                continue
        try:
            return converted(choices[-1], value)
        except ValueError:
            if len(choices) == 1:
                raise
    elif origin is Literal:
        if any(type(value) is type(a) and value == a for a in arguments):
            return value
        guess = did_you_mean(value, [a for a in arguments if isinstance(a, str)]) if isinstance(value, str) else ""
        raise ValueError(f"expected {expected(kind)}{guess}")
    elif origin is list:
        if isinstance(value, list | tuple):
            try:
                return [converted(arguments[0], v) for v in value]
            except ValueError as error:
                if get_origin(arguments[0]) is Literal:
                    raise ValueError(f"a list; each item: {error}") from None
    elif origin is dict:
        if isinstance(value, dict):
            return {k: converted(arguments[1], v) for k, v in value.items()}
    elif kind is Any:
        return value
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ValueError("expected a finite number")
            return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"expected {expected(kind)}")


def checked(key: Key, value: Any) -> Any:
    """``value`` converted to the type of ``key`` and inside its range.

    Raises:
        ValueError: the rule that is broken, in words, without the key and the value.
    """
    value = converted(key.type, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key.minimum is not None and value < key.minimum:
            raise ValueError(f"must be at least {_number(key.minimum)}")
        if key.maximum is not None and value > key.maximum:
            raise ValueError(f"must be at most {_number(key.maximum)}")
    return value


def _number(x: float) -> str:
    return str(int(x)) if float(x).is_integer() else str(x)


def unknown_key(full: str, known: Iterable[str], written: str = "{}", quiet: Iterable[str] = ()) -> str:
    """What to say about a key that does not exist: the nearest valid one, or what there is to choose from.

    Looked for, in this order: a near name in the section, the same name elsewhere, a near section, a near full key.
    ``quiet`` are valid keys too, suggested but not listed. ``written`` formats a suggestion as the user would type it
    ("--{}" on the command line); in a file, a key of the same section is suggested without the section.
    """
    listed = list(known)
    known = [*listed, *quiet]
    section, _, name = full.partition(".")
    here = _names(known, section)
    choices = ", ".join(_names(listed, section) or here)
    if here and not name:
        return f"a section, not a key; its keys are {choices}"
    if here and (found := nearest(name, here)):
        return f"unknown key - did you mean '{found if written == '{}' else written.format(f'{section}.{found}')}'?"
    same_name = [k for k in known if k.rpartition(".")[2] == (name or section)]
    near = nearest(section, {k.partition(".")[0] for k in known}) if name and not here else None
    guess = f"{near}.{name}" if near else ""
    if guess not in known:
        guess = same_name[0] if same_name else nearest(full, known) or ""
    what = "unknown key" if here or not name else f"unknown section [{section}]"
    if guess and (same_name or not here):
        return f"{what} - did you mean '{written.format(guess)}'?"
    if here:
        return f"{what}; [{section}] has {choices}"
    if near:
        return f"{what} - did you mean [{near}]?"
    return f"{what}; the sections are {', '.join(dict.fromkeys(k.partition('.')[0] for k in listed))}"


def _names(known: list[str], section: str) -> list[str]:
    return [k.partition(".")[2] for k in known if k.partition(".")[0] == section]
