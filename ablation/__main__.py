"""The commands of the ablation layer: ``python -m ablation COMMAND ...``. Exit code 2 for a mistake of the user's.

Each command's module is imported when it is called: ``check`` and ``list`` must answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module

from config.errors import ConfigError, places_are_the_users
from config.keys import did_you_mean

USAGE = """\
python -m ablation list                              every question: variable, arms, runs, state of its results
python -m ablation check [NAME ...]                  refuse questions that change more than they declare (default: all)
python -m ablation run NAME [options] [--section.key value ...]
                                                     every arm and seed, then the report (run_ablation.sh; run --help)
python -m ablation compare DIRECTORY ... [--against DIRECTORY ...]
                                                     the report from run directories
python -m ablation pack DIRECTORY                    the report as one HTML file, and a tar without checkpoints
python -m ablation new A.toml B.toml [...]           a question from plain TOML files, its variable inferred
python -m ablation export NAME [DIRECTORY]           one flat TOML an arm

NAME is a file of train_configs/ablations/ without .toml, or a path."""

COMMANDS = {
    "list": "ablation.overview:list_questions",
    "check": "ablation.overview:check",
    "run": "ablation.run:main",
    "compare": "ablation.compare:main",
    "pack": "ablation.pack:main",
    "new": "ablation.new:main",
    "export": "ablation.export:main",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        print(f"{name}: no such command{did_you_mean(name, COMMANDS)}\n\n{USAGE}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[name].partition(":")
    command: Callable[[list[str]], int] = getattr(import_module(module), function)
    try:
        with places_are_the_users():
            return command(rest)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # "| head" has seen enough; without this Python complains once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
