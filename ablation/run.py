"""``run``: every arm and seed of a question, interleaved and resumable, then its report. What run_ablation.sh calls."""

from __future__ import annotations

import argparse
import os

from ablation.guard import guard
from ablation.plan import check_files, check_processes, folder_for, plan
from ablation.question import find, guess, read
from ablation.runner import dry_run, execute
from config import command_line
from config.errors import ConfigError


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers, as in 4,5") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ablation run",
        allow_abbrev=False,
        description="Run every arm and seed of a question, interleaved, skipping what is done; then write the report.",
        epilog="--section.key VALUE after the name: that key, in every arm. NGPU (environment, 1): processes a run.",
    )
    parser.add_argument("name", nargs="?", help="a file of train_configs/ablations/ without .toml, or a path")
    parser.add_argument("--dry_run", action="store_true", help="list runs, states and commands; touch nothing")
    parser.add_argument("--arms", default="", metavar="A,B", help="only these arms")
    parser.add_argument("--seeds", type=_numbers, default=[], metavar="K,L", help="only these of the planned seeds")
    parser.add_argument("--only", type=int, metavar="INDEX", help="one run of the plan, from 1: a task of a job array")
    parser.add_argument(
        "--count", action="store_true", help="print the number of planned runs: the size of a job array"
    )
    parser.add_argument("--new", action="store_true", help="a new folder of results: outputs/<name>-2, -3, ...")
    parser.add_argument("--anywhere", action="store_true", help="on other numbers of processes than runs_on names")
    return parser


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The words that are this command's, and those (``--section.key`` and their values) laid over every arm.

    Hyphens and underscores in an option are the same, as they are in a key.
    """
    own: list[str] = []
    overrides: list[str] = []
    current = own
    for word in arguments:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            current = overrides if "." in option else own
            if current is own:
                word = "--" + option[2:].replace("-", "_") + equals + value
        current.append(word)
    return own, overrides


def processes() -> int:
    """NGPU of the environment, 1 if unset.

    Raises:
        ConfigError: not a whole number above 0, or NNODES above 1.
    """
    if os.environ.get("NNODES", "1") not in ("", "1"):
        raise ConfigError("NNODES: an ablation runs on one machine; give each run its own with ablation/slurm_array.sh")
    text = os.environ.get("NGPU") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"NGPU = {text!r} (environment): expected a whole number of at least 1")
    return int(text)


def main(arguments: list[str]) -> int:
    """``run NAME ...``; returns the exit code: 0, 1 if a run failed, 130 if stopped.

    Raises:
        ConfigError: anything the user should change before the first run starts.
    """
    own, overrides = split(arguments)
    options, unknown = _parser().parse_known_args(own)
    if unknown:
        known = [f"--{name}" for name in vars(options) if name != "name"]
        raise ConfigError(f"{unknown[0]}: not an option of run{guess(unknown[0], known)}; a key is --section.key VALUE")
    if options.name is None:
        raise ConfigError(
            "run: which question? Its NAME comes first: run NAME --section.key VALUE."
            " `python -m ablation list` shows the questions"
        )
    if options.only is not None and (options.new or options.arms or options.seeds):
        raise ConfigError("--only INDEX: one run of the plan; leave out --new, --arms and --seeds")
    gpus = processes()
    leaves = command_line.parse(overrides).leaves
    question = read(find(options.name))
    check_processes(question, gpus, options.anywhere)
    chosen = plan(guard(question, leaves, gpus).accepted(), gpus, overrides)
    if options.count:
        print(len(chosen.runs))
        return 0
    runs = chosen.choose([arm for arm in options.arms.split(",") if arm], options.seeds)
    if options.only is not None:
        runs = [run for run in runs if run.index == options.only]
        if not runs:
            raise ConfigError(f"--only {options.only}: the plan has runs 1 to {len(chosen.runs)}")
    check_files(chosen)
    folder = folder_for(chosen, options.new)
    if options.dry_run:
        dry_run(chosen, folder, runs)
        return 0
    status = execute(chosen, folder, runs, alone=options.only is None, say=lambda text: print(text, flush=True))
    if status == 130 or options.only is not None:
        return status
    from ablation.compare import main as compare

    try:
        return compare([str(folder)]) or status
    except ConfigError as error:
        print(f"no report: {error}", flush=True)
        return status or 2
