"""The command line: ``--section.key value`` for every key of the schema, with the checks and messages of a file.

A parser over the schema instead of a library: the values that the user typed must be told from defaults (each has an
origin), a misspelt key must be answered in the same words as in a file, and loading must take milliseconds.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin

import tomli

from config import torchtitan_keys
from config.errors import ConfigError
from config.keys import all_keys, expected, help_lines, shown, unknown_key
from config.toml_file import check_leaf

WHERE = "command line"
_ARM = "ablation.arm"
_BOOLS = {"true": True, "false": False}


@dataclass
class CommandLine:
    """What was typed. ``leaves`` holds full key -> checked value, without the file and the arm."""

    config_file: str = ""
    arm: str | None = None
    leaves: dict[str, Any] = field(default_factory=dict)
    wants_help: bool = False


def parse(argv: list[str]) -> CommandLine:
    """Read ``--section.key value``, ``--section.key=value``, ``--flag``, ``--no-flag`` and lists (``a b`` or ``a,b``).

    Hyphens and underscores in a key are the same. Of a key given twice, the last counts.

    Raises:
        ConfigError: unknown key (with the nearest), missing value, wrong type, out of range: each mistake on a line.
    """
    line, mistakes, position = CommandLine(), [], 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word in ("-h", "--help"):
            line.wants_help = True
            continue
        if not word.startswith("--"):
            mistakes.append(f"{WHERE}: {shown(word)}: not an option; options look like --training.steps 100")
            continue
        option, equals, attached = word[2:].partition("=")
        option, negated = _without_negation(option.replace("-", "_"))
        values = [attached] if equals else []
        if not equals:
            while position < len(argv) and not argv[position].startswith("--") and _takes(option, values):
                values.append(argv[position])
                position += 1
        try:
            _store(line, option, negated, values)
        except ConfigError as error:
            mistakes.append(str(error))
    if mistakes and not line.wants_help:
        raise ConfigError("\n".join(mistakes))
    return line


def _without_negation(option: str) -> tuple[str, bool]:
    """``no_compile.enable`` and ``compile.no_enable`` -> ("compile.enable", True)."""
    if option in all_keys():
        return option, False
    section, _, name = option.partition(".")
    plain = f"{section.removeprefix('no_')}.{name.removeprefix('no_')}"
    known_bool = plain in all_keys() and all_keys()[plain].type in (bool, bool | None)
    return (plain, True) if known_bool and plain != option else (option, False)


def _takes(option: str, values: list[str]) -> bool:
    """Whether one more word, which is no option, is a value of ``option``. A switch takes it too, to be told if it is
    neither true nor false: there is nothing else that it could be.
    """
    key = all_keys().get(option)
    return (key is not None and get_origin(key.type) is list) or not values


def _store(line: CommandLine, option: str, negated: bool, values: list[str]) -> None:
    if option in ("job.config_file", _ARM):
        if not values:
            raise ConfigError(f"{WHERE}: --{option}: needs a value")
        if option == _ARM:
            line.arm = values[0]
        else:
            line.config_file = values[0]
        return
    key = all_keys().get(option)
    if key is None and not torchtitan_keys.is_known(option):
        if option.startswith(("ablation.", "arms.")):
            raise ConfigError(
                f"{WHERE}: --{option}: belongs in the TOML file; the command line takes --{_ARM} NAME only"
            )
        guess = unknown_key(option, all_keys(), "--{}", [*torchtitan_keys.names(), _ARM])
        raise ConfigError(f"{WHERE}: --{option}: {guess}")
    kind = Any if key is None else key.type
    if negated and values:
        raise ConfigError(f"{WHERE}: --no_{option} takes no value; say --{option} false")
    if key is not None and not values and kind not in (bool, bool | None):
        raise ConfigError(f"{WHERE}: --{option}: needs a value: {expected(kind)}")
    value = not negated if not values else _typed(kind, values)
    line.leaves[option] = check_leaf(option, value, WHERE, "--{}")


def _typed(kind: Any, words: list[str]) -> Any:
    """The typed words as the value a TOML file would hold; left as text where they are not (the check then says so)."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _typed(next(a for a in arguments if a is not type(None)), words)
    if origin is list:
        if words[0].startswith("["):
            return _as_toml(" ".join(words))
        return [_typed(arguments[0], [w]) for word in words for w in word.split(",") if w]
    if kind is bool:
        return _BOOLS.get(words[0].lower(), words[0])
    if kind in (int, float):
        try:
            return kind(words[0])
        except ValueError:
            return words[0]
    if origin is Literal:
        return next((a for a in arguments if str(a) == words[0]), words[0])
    if kind is str:
        return words[0]
    return _as_toml(words[0])


def _as_toml(text: str) -> Any:
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def help_text() -> str:
    """The text of ``--help``: every option, its type, its default and the docstring line under its field."""
    out = [
        "Train as a TOML file says. Any key of it can be given here; the command line wins.",
        "",
        "  --job.config_file FILE   TOML file to train from",
        "  --ablation.arm NAME      arm of an ablation file (a+b: both, left to right)",
        "  --section.key VALUE      lists: a b or a,b; switches: --compile.enable, --no-compile.enable",
    ]
    lines, section = help_lines(), ""
    for full, key in all_keys().items():
        if full == "job.config_file":
            continue
        if full.partition(".")[0] != section:
            section = full.partition(".")[0]
            out += ["", f"[{section}]"]
        bounds = [f"at least {key.minimum:g}"] if key.minimum is not None else []
        bounds += [f"at most {key.maximum:g}"] if key.maximum is not None else []
        about = "; ".join([expected(key.type), *bounds, f"default {shown(key.default)}"])
        out += [f"  --{full}", f"      {lines[full]}", f"      ({about})"]
    return "\n".join(out)
