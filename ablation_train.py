"""Launch this checkout's train.py: what ``run_llama_train.sh`` and the installed command ``ablation-train`` run.

    ablation-train --job.config_file train_configs/llama3_8b.toml --training.steps 5     # from any directory
    NGPU=2 CONFIG_FILE=train_configs/llama3_8b.toml ./run_llama_train.sh

Environment: NGPU ranks on this machine (1), CONFIG_FILE unless --job.config_file is given
(train_configs/llama_debug.toml), LOG_RANK local ranks whose output is shown (0; "0,3" for two), and for several
machines NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. Everything that can be wrong is checked here, once: torchrun
turns every rank's exit code into 1 and prints one traceback a rank.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from config.load import Resolved

ROOT = Path(__file__).resolve().parent
DEFAULT_CONFIG = "train_configs/llama_debug.toml"
ROOMS = ("config", "data", "model", "parallelisms", "trainer", "ablation", "interchange", "assembly", "titan", "train")
"""Top-level names that must come from this checkout."""


@dataclass(frozen=True)
class Launch:
    """How many processes, where, and whose output is shown."""

    ngpu: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    log_ranks: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return self.ngpu * self.nnodes


def main(arguments: list[str] | None = None) -> int:
    """Check, train, say what to type next. Returns the exit code: 2 for a user's mistake, else the training's own."""
    arguments = sys.argv[1:] if arguments is None else arguments
    sys.path.append(str(ROOT))  # last: another package of a room's name would win, and is refused
    if mistake := shadowed():
        return _fail(mistake)
    from config.errors import ConfigError
    from config.load import load
    from config.render import render_dry_run
    from config.world import check_world

    try:
        launch = launch_from(os.environ)
        complete = with_config_file(arguments, os.environ)
        resolved = load(complete)
        check_world(resolved.config, launch.world_size)
        job = resolved.config.job
        if job.dry_run:
            print(render_dry_run(resolved, launch.world_size), flush=True)
            return 0
        if launch.world_size > 1:
            _check_ranks(resolved, launch)
    except ConfigError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    with tempfile.TemporaryDirectory(prefix="ablation-train-") as logs:
        code = _run(command(launch, complete, logs), launch)
        if code:
            _show_hidden_error(Path(logs))
    if code == 0 and launch.node_rank == 0:
        folder = job.run_dir or str(Path(job.dump_folder) / Path(job.config_file).stem)
        print(next_commands(folder, arguments, resolved.config.debug.seed), flush=True)
    return code


def shadowed(root: Path = ROOT) -> str:
    """What is wrong if a room of this checkout would be imported from somewhere else, or nothing."""
    if not (root / "train.py").is_file():
        return (
            f"ablation-train runs from a checkout, and {root} is none: it was installed without -e."
            " In the checkout: pip install -e ."
        )
    for room in ROOMS:
        spec = importlib.util.find_spec(room)
        places = [] if spec is None else list(spec.submodule_search_locations or [spec.origin or "built in"])
        if any(Path(place).resolve().is_relative_to(root) for place in places):
            continue
        if spec is None:
            return f"{root / room} is missing: this checkout is not complete."
        owners = importlib.metadata.packages_distributions().get(room, [])
        remedy = f"pip uninstall {' '.join(owners)}" if owners else "take its folder off PYTHONPATH"
        return (
            f"another package called {room!r} hides the one of this checkout:"
            f" it comes from {places[0]}, not from {root}."
            f" Remove it ({remedy}) or use a virtual environment of its own (./setup_env.sh dev .venv)."
        )
    return ""


def launch_from(environment: Mapping[str, str]) -> Launch:
    """The launch that the environment variables ask for.

    Raises:
        ConfigError: a value that is no number or out of range, or several machines without an address.
    """
    from config.errors import ConfigError

    def number(name: str, default: int, low: int, high: int | None, of: str) -> int:
        text = environment.get(name) or str(default)
        if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
            span = f"{low} or more" if high is None else f"{low} to {high}"
            raise ConfigError(
                f"{name} = {text!r} (environment): expected {of}, a whole number: {span}. Set {name}={default}."
            )
        return int(text)

    ngpu = number("NGPU", 1, 1, None, "ranks on this machine")
    nnodes = number("NNODES", 1, 1, None, "machines")
    node_rank = number("NODE_RANK", 0, 0, nnodes - 1, "this machine's place among NNODES")
    port = number("MASTER_PORT", 29500, 1, 65535, "a free port of the first machine")
    missing = [name for name in ("NODE_RANK", "MASTER_ADDR") if nnodes > 1 and not environment.get(name)]
    if missing:
        raise ConfigError(
            f"NNODES = {nnodes} needs {' and '.join(missing)}: start this on each machine with its NODE_RANK"
            f" (0 to {nnodes - 1}) and MASTER_ADDR, the first machine's address."
        )
    shown = (environment.get("LOG_RANK") or "0").split(",")
    for text in shown:
        if not text.strip().isdecimal() or int(text) >= ngpu:
            raise ConfigError(
                f"LOG_RANK = {environment['LOG_RANK']!r} (environment): expected local ranks, comma between them,"
                f" each 0 to {ngpu - 1} (NGPU = {ngpu})."
            )
    log_ranks = tuple(int(text) for text in shown)
    return Launch(ngpu, nnodes, node_rank, environment.get("MASTER_ADDR") or "", port, log_ranks)


def with_config_file(arguments: list[str], environment: Mapping[str, str]) -> list[str]:
    """The arguments with ``--job.config_file``: theirs, else CONFIG_FILE, else the debug configuration.

    A relative name is looked for in the working directory, then in the checkout.

    Raises:
        ConfigError: CONFIG_FILE is not a file. (A file that is named in the arguments is judged by what loads it.)
    """
    from config.errors import ConfigError

    for place, word in enumerate(arguments):
        option, equals, name = word.partition("=")
        if option in ("--help", "-h"):
            return arguments
        if option.replace("-", "_") == "__job.config_file":
            name = name if equals else "".join(arguments[place + 1 : place + 2])
            if Path(name).exists() or not (ROOT / name).is_file():
                return arguments
            after = arguments[place + (1 if equals else 2) :]
            return [*arguments[:place], "--job.config_file", str(ROOT / name), *after]
    name = environment.get("CONFIG_FILE") or ""
    found = [path for path in (Path(name), ROOT / name) if path.is_file()] if name else [ROOT / DEFAULT_CONFIG]
    if not found:
        if any(path.is_dir() for path in (Path(name), ROOT / name)):
            raise ConfigError(
                f"CONFIG_FILE = {name!r} (environment): is a folder; give a TOML file, such as {DEFAULT_CONFIG}."
            )
        looked = "" if Path(name).is_absolute() else " in " + " or ".join(dict.fromkeys((str(Path.cwd()), str(ROOT))))
        known = ", ".join(sorted(f"train_configs/{p.name}" for p in (ROOT / "train_configs").glob("*.toml")))
        raise ConfigError(f"CONFIG_FILE = {name!r} (environment): no such file{looked}. This checkout has {known}.")
    return ["--job.config_file", str(found[0]), *arguments]


def command(launch: Launch, arguments: list[str], logs: str) -> list[str]:
    """What is executed. One rank needs no torchrun; ranks that are not shown write into ``logs``.

    The streams of shown ranks are left alone, so that a terminal stays a terminal.
    """
    train = [str(ROOT / "train.py"), *arguments]
    if launch.world_size == 1:
        return [sys.executable, *train]
    # -P: a file of the working directory must not hide a module of torch
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", str(launch.ngpu)]
    if launch.nnodes == 1 and not launch.master_addr:
        torchrun += ["--standalone"]
    else:
        torchrun += ["--nnodes", str(launch.nnodes), "--node-rank", str(launch.node_rank)]
        torchrun += ["--master-addr", launch.master_addr, "--master-port", str(launch.master_port)]
    hidden = [f"{rank}:3" for rank in range(launch.ngpu) if rank not in launch.log_ranks]
    if hidden:
        torchrun += ["--log-dir", logs, "--redirects", ",".join(hidden)]
    return [*torchrun, *train]


def next_commands(folder: str, arguments: list[str], seed: int) -> str:
    """Two commands that make sense after a run: its curves, and the same with another seed beside it."""
    tensorboard = _typed(Path(sys.executable).with_name("tensorboard"))
    installed = Path(sys.argv[0]).name == "ablation-train"
    launcher = _typed(Path(sys.argv[0]) if installed else ROOT / "run_llama_train.sh")
    settings = "".join(f"{n}={shlex.quote(os.environ[n])} " for n in ("NGPU", "CONFIG_FILE") if os.environ.get(n))
    curves = shlex.join([tensorboard, "--logdir", folder])
    kept = _without(arguments, "--job.run_dir", "--debug.seed")  # a directory holds one configuration
    again = settings + shlex.join([launcher, *kept, "--debug.seed", str(seed + 1)])
    return f"\nThe curves, and the same run with another seed:\n\n  {curves}\n  {again}"


def _without(arguments: list[str], *options: str) -> list[str]:
    """The arguments without those options and their one value."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, _ = word.partition("=")
        if "--" + option[2:].replace("-", "_") not in options:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def _typed(path: Path) -> str:
    """A program as one would type it in the working directory: by name alone if it is on PATH."""
    if shutil.which(path.name):
        return path.name
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else os.path.join(".", relative)


def _check_ranks(resolved: Resolved, launch: Launch) -> None:
    """What only a rank would find out, found once: too few GPUs, a run directory that is taken, data with a mistake.

    Tokenises a corpus that is new, so that the ranks find it in the cache. A single rank needs none of this: its own
    message and exit code reach the user.

    Raises:
        ConfigError: as train.py would.
    """
    import torch

    from config.layouts import check_layout_on
    from config.world import check_devices, derived
    from data.build import build_data
    from interchange.runs import check_interchange
    from model.attention_choice import attention_of
    from parallelisms.float8 import check_float8
    from trainer.run_directory import run_directory_state

    logging.basicConfig(format="%(message)s", level=logging.INFO)
    available = torch.cuda.device_count()
    device = "cuda" if available else "cpu"
    check_devices(launch.ngpu, available, device)
    check_layout_on(resolved.config, device, torch.__version__)
    check_float8(resolved.config, device)
    attention_of(resolved.config, device)
    run_directory_state(resolved)
    degree = derived(resolved.config, launch.world_size)["data_parallel_degree"].value
    check_interchange(resolved.config)
    build_data(resolved.config, dp_rank=0, dp_degree=degree).close()


def _run(line: list[str], launch: Launch) -> int:
    """Run a command to its end and return its exit code. SIGTERM is passed on; Ctrl-C reaches it from the terminal."""
    threads = str(max(1, (os.cpu_count() or 1) // launch.ngpu))  # torchrun would set 1 and warn
    environment = {"OMP_NUM_THREADS": threads, **os.environ, "NGPU": str(launch.ngpu), "NNODES": str(launch.nnodes)}
    process = subprocess.Popen(line, env=environment)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    code = process.wait()
    return 128 - code if code < 0 else code


def _show_hidden_error(logs: Path) -> None:
    """Print the end of what the first hidden rank to fail wrote: torchrun names the rank, not the error."""
    written = [path for path in logs.rglob("stderr.log") if "Error" in path.read_text(errors="replace")]
    if written:
        first = min(written, key=lambda path: path.stat().st_mtime)
        lines = first.read_text(errors="replace").splitlines()[-40:]
        print(f"\nlocal rank {first.parent.name} (not shown above) ended with:", *lines, sep="\n", file=sys.stderr)


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
