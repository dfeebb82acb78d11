"""``python -m config``: read configurations without starting anything. Exits with 2 and one message on a mistake."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from config import command_line
from config.documentation import TARGET, render_docs
from config.errors import ConfigError
from config.load import Resolved, load, load_file
from config.render import render, render_diff
from config.world import check_world, world_size_from

USAGE = """\
python -m config show FILE [--section.key value ...]  every value with its origin
python -m config diff A B                             the keys in which two files differ
python -m config check [--section.key value ...]      the checks before a start; silent if all is well
python -m config docs                                 write docs/configuration.md

FILE, A and B: a TOML file, or file.toml:arm for one arm of an ablation."""

_TAKES = {"show": "a FILE, before any --section.key", "diff": "two files, A and B", "docs": "nothing"}


def main(argv: list[str]) -> int:
    """Run one command. Returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, rest = argv[0], argv[1:]
    try:
        if name == "show" and rest and not rest[0].startswith("--"):
            resolved = _open(rest[0], command_line.parse(rest[1:]))
            print(render(resolved))
            for note in resolved.notes:
                print(f"# note: {note}")
        elif name == "diff" and len(rest) == 2:
            nothing = command_line.CommandLine()
            print(render_diff(_open(rest[0], nothing), _open(rest[1], nothing), (rest[0], rest[1])))
        elif name == "check":
            resolved = load(rest)
            world_size = world_size_from()
            if world_size is not None:
                check_world(resolved.config, world_size)
        elif name == "docs" and not rest:
            TARGET.parent.mkdir(exist_ok=True)
            TARGET.write_text(render_docs(), encoding="utf-8")
            print(f"wrote {TARGET}")
        elif name in _TAKES:
            raise ConfigError(f"python -m config {name}: takes {_TAKES[name]}. Commands:\n{USAGE}")
        else:
            raise ConfigError(f"python -m config {' '.join(argv)}: not a command. Commands:\n{USAGE}")
        sys.stdout.flush()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stdout = open(os.devnull, "w")
    return 0


def _open(name: str, line: command_line.CommandLine) -> Resolved:
    """A file, or ``file.toml:arm``."""
    path, _, arm = name.rpartition(":") if ":" in name and not Path(name).exists() else (name, "", "")
    return load_file(path, line.leaves, line.arm or arm or None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
