"""Evaluate a run's checkpoint on held-out tasks with lm-eval, and keep the results in its run directory.

python evaluate.py RUN_DIR --tasks arc_easy,hellaswag
python evaluate.py RUN_DIR --tasks stdlib_names --include_path tests/assets/tasks --step 40

The checkpoint is exported as a Hugging Face folder, which is removed again. Needs the extra: pip install -e ".[eval]"
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from config.errors import ConfigError, places_are_the_users
from evaluation.harness import HarnessFailed, check_installed, recorded_tasks, result_of, run_harness, versions_of
from evaluation.record import FOLDER, add_result, add_to_tensorboard, check_free


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run_dir", type=Path, help="a run directory with checkpoints")
    add("--tasks", required=True, help="names of lm-eval's tasks or groups, with commas between them")
    add("--include_path", type=Path, help="folder with tasks of your own (YAML)")
    add("--limit", type=int, help="first documents of each task only: a trial, kept in a file of its own")
    add("--step", type=int, help="checkpoint of the run (the newest)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 on a GPU, else float32"
    )
    add("--batch_size", default="8", help="documents at once, or auto (8)")
    return parser.parse_args(argv)


def task_names(options: argparse.Namespace) -> list[str]:
    """The tasks that are asked for, each once.

    Raises:
        ConfigError: there are none, or an option cannot be what it is.
    """
    names = list(dict.fromkeys(name.strip() for name in options.tasks.split(",") if name.strip()))
    if not names:
        raise ConfigError(f"--tasks {options.tasks!r}: names no task.")
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit}: must be at least 1. Leave it out for all documents.")
    if options.batch_size != "auto" and not (options.batch_size.isdecimal() and int(options.batch_size)):
        raise ConfigError(f'--batch_size {options.batch_size}: must be a number of at least 1, or "auto".')
    if options.include_path is not None and not options.include_path.is_dir():
        raise ConfigError(f"--include_path {options.include_path}: no such folder.")
    return names


def evaluate(options: argparse.Namespace) -> None:
    """Export, evaluate and record."""
    tasks = task_names(options)
    check_installed()
    import torch

    from interchange.export import export_run, open_run

    gpu = torch.cuda.is_available()
    if options.device == "cuda" and not gpu:
        raise ConfigError("--device cuda: torch sees no GPU here. Use --device cpu.")
    device = "cuda" if gpu and options.device != "cpu" else "cpu"
    dtype = {"cuda": "bfloat16", "cpu": "float32"}[device] if options.dtype == "auto" else options.dtype

    config, checkpoint = open_run(options.run_dir, options.step)
    step = int(checkpoint.name.removeprefix("step-"))
    check_free(options.run_dir, tasks, step, options.limit)
    (options.run_dir / FOLDER).mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=options.run_dir / FOLDER) as folder:
        model = export_run(options.run_dir, Path(folder) / "model", step=step, dtype=dtype)
        results = run_harness(
            model,
            tasks,
            dtype=dtype,
            device=device,
            batch_size=options.batch_size,
            limit=options.limit,
            include_path=options.include_path,
        )
    refused = []
    for task in recorded_tasks(tasks, results):
        result = result_of(task, results)
        for name, measured in result["metrics"].items():
            error = "" if measured["stderr"] is None else f" +- {measured['stderr']:.4f}"
            print(f"{task}  {name}  {measured['value']:.4f}{error}", flush=True)
        result = {"checkpoint": f"{config.checkpoint.folder}/{checkpoint.name}", **result, "with": versions_of(results)}
        try:
            print(f"  {add_result(options.run_dir, task, step, options.limit, result)}", flush=True)
        except ConfigError as error:  # of a tag, or another process was faster: keep the others
            refused.append(str(error))
            continue
        if config.metrics.enable_tensorboard and options.limit is None:
            add_to_tensorboard(options.run_dir / config.metrics.save_tb_folder, task, step, result["metrics"])
    if refused:
        raise ConfigError("\n".join(refused))


def main(argv: list[str] | None = None) -> int:
    """Evaluate, and return the exit code: 0 done, 1 lm-eval failed, 2 a mistake of the user's."""
    options = parse(argv)
    try:
        with places_are_the_users():
            evaluate(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except HarnessFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
