"""``python -m interchange``: Hugging Face folders to checkpoints and back. A mistake is one message and exit code 2."""

from __future__ import annotations

import sys
from typing import Any

from config.errors import ConfigError, places_are_the_users

USAGE = """\
python -m interchange export RUN_DIR OUT [--step N] [--dtype bfloat16]
    write a run's checkpoint, the newest or that of step N, as a new Hugging Face folder OUT
python -m interchange import HF_FOLDER OUT
    write a Hugging Face folder as a new checkpoint OUT for checkpoint.initial_load_path; OUT/model.toml fits it"""


def main(argv: list[str]) -> int:
    """Run one command. Returns the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    try:
        command, paths, options = _parsed(argv)
        with places_are_the_users():
            _run(command, paths, options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(command: str, paths: list[str], options: dict[str, Any]) -> None:
    if command == "export":
        from interchange.export import export_run

        print(f"wrote {export_run(*paths, **options)}")
        return
    from interchange.to_checkpoint import SNIPPET, import_hf

    out = import_hf(*paths)
    print(f"wrote {out}\n\n{(out / SNIPPET).read_text()}\n[checkpoint]\nenable = true")
    print(f'initial_load_path = "{out}"')


def _parsed(argv: list[str]) -> tuple[str, list[str], dict[str, Any]]:
    command, rest, paths = argv[0], argv[1:], []
    options: dict[str, Any] = {}
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if name in ("--step", "--dtype") and command == "export":
            if not value and not rest:
                raise ConfigError(f"{name}: expected a value\n{USAGE}")
            value = value or rest.pop(0)
            if name == "--step" and not value.isdecimal():
                raise ConfigError(f"--step {value}: expected the number of a step")
            options[name[2:]] = int(value) if name == "--step" else value
        elif word.startswith("-"):
            raise ConfigError(f"{word}: not an option of {command}\n{USAGE}")
        else:
            paths.append(word)
    if command not in ("export", "import") or len(paths) != 2:
        raise ConfigError(f"python -m interchange {' '.join(argv)}: not a command. Commands:\n{USAGE}")
    return command, paths, options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
