"""Ours and the peers on one shape and the same GPUs, in turn, every figure from the trainers' own records.

    python -m benchmarks.compare dense_1b moe_7b-transformers --peer_path DIR
    python -m benchmarks.compare --all --ngpu 2 --peer_path DIR

A row is a workload beside a peer; ``dense_1b`` alone means each of its peers. A row that was measured at the same
commit, settings and machine is not measured again, and a command that was interrupted goes on where it ended. The raw
files are in --out; ``python -m benchmarks.speed_table`` makes speed.json of them. docs/performance.md says how to read
both.

Exit code: 0 every row is measured; 1 a side failed or the time ran out; 2 a mistake on the command line; 3 all rows
that could be are measured, but a peer is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.rows import SPEED, file_name, lacks, load_raw, row_of, save_raw, sentence
from benchmarks.session import OutOfTime, Row, Session
from benchmarks.side import ROOT, WINDOW, Job, Side, parse_settings
from benchmarks.side_ours import Arm, Ours
from benchmarks.side_torchtitan import Torchtitan
from benchmarks.side_transformers import Transformers
from benchmarks.workloads import TABLE, WORKLOADS, Workload
from config.arithmetic import flops_per_token
from config.errors import ConfigError
from config.flavors import resolve_shape
from config.load import load_file

PEERS = ("torchtitan", "transformers", "arm")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("rows", nargs="*", metavar="WORKLOAD[-PEER]", help=f"workloads: {', '.join(WORKLOADS)}")
    made.add_argument("--all", action="store_true", help=f"every row of {', '.join(TABLE)}")
    made.add_argument("--ngpu", type=int, default=1, help="GPUs; without any, CPU processes")
    made.add_argument("--peer_path", help="folder that holds torchtitan 0.2.2")
    made.add_argument("--out", type=Path, default=SPEED, help="folder of the raw files")
    made.add_argument("--again", action="store_true", help="measure rows anew that are measured")
    kinds: dict[str, type[Side]] = {"ours": Ours, "torchtitan": Torchtitan, "transformers": Transformers, "arm": Arm}
    for side, kind in kinds.items():
        made.add_argument(
            f"--{side}_settings",
            metavar="LIST",
            help=f"as in 8,4+full (default: the workload's); words: {', '.join(kind.words)}",
        )
    made.add_argument(
        "--search",
        choices=("first", "best"),
        default="first",
        help="the setting that runs first, or fastest",
    )
    made.add_argument("--once", action="store_true", help="one run a side: a drift of the machine shows as a ratio")
    made.add_argument("--timed_steps", type=int, default=20, help="after those of the workload's warm-up")
    made.add_argument("--limit_s", type=float, default=280.0, help="longest run of a side")
    made.add_argument("--budget_s", type=float, default=float("inf"), help="end after so long, keeping what is done")
    made.add_argument("--commit", help="of the checkout, where git is not at hand")
    made.add_argument("--ours_options", nargs=argparse.REMAINDER, default=[], help="of train.py; comes last")
    return made


def wanted_rows(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Workload -> peers, as the command line names them.

    Raises:
        ConfigError: nothing is named, or something unknown.
    """
    names = list(arguments.rows) + (list(TABLE) if arguments.all else [])
    if not names:
        raise ConfigError(f"name a workload ({', '.join(WORKLOADS)}), a row such as dense_1b-torchtitan, or --all")
    found: dict[str, list[str]] = {}
    for name in names:
        workload, _, peer = name.partition("-")
        if workload not in WORKLOADS:
            raise ConfigError(f"{name}: no workload {workload!r}; known: {', '.join(WORKLOADS)}")
        possible = [p for p in PEERS if p in WORKLOADS[workload].settings]
        if peer and peer not in possible:
            raise ConfigError(f"{name}: {workload} is compared with {' and '.join(possible)}, not with {peer!r}")
        kept = found.setdefault(workload, [])
        kept += [p for p in ([peer] if peer else possible) if p not in kept]
    return found


def machine() -> dict[str, Any]:
    """environment.json of this machine, from a process that ends: this one must hold no memory of a GPU."""
    code = (
        "import json; from pathlib import Path; from trainer.environment import describe_environment;"
        "print(json.dumps(describe_environment(Path('.'), deterministic=False)[0]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def commit() -> str:
    """The commit that is checked out, with a hash of what the tree changes in it, results apart; else "unknown"."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    head = git("rev-parse", "--verify", "HEAD").strip()
    changes = git("diff", "HEAD", "--", ".", ":!benchmarks/results")
    if not head:
        return "unknown"
    return head[:12] + (f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else "")


def job_of(workload: Workload, arguments: argparse.Namespace, device: str, work: Path) -> Job:
    """What the sides do for ``workload``."""
    config = load_file(ROOT / workload.config).config
    return Job(
        workload=workload,
        config=config,
        shape=resolve_shape(config.model, config.moe),
        ngpu=arguments.ngpu,
        device=device,
        steps=workload.warm_up + arguments.timed_steps,
        work=work,
        limit_s=arguments.limit_s,
        ours_options=tuple(arguments.ours_options),
    )


def open_row(
    job: Job, peer: Side, ours: Side, arguments: argparse.Namespace, lists: dict[str, str], environment: dict[str, Any]
) -> Row:
    """The row's raw file: with the measurements of the same identity that it holds, or empty."""
    identity = {
        "workload": job.workload.name,
        "peer": peer.name,
        "title": peer.title(),
        "ngpu": job.ngpu,
        "gpu": environment["gpu_name"],
        "torch": environment["torch"],
        "commit": arguments.commit,
        "steps": job.steps,
        "warm_up": job.workload.warm_up,
        "once": arguments.once,
        "search": arguments.search,
        "settings": {side: lists[side] for side in ("ours", peer.name)},
        "ours_options": list(job.ours_options),
    }
    path = arguments.out / file_name(job.workload.name, peer.name, job.ngpu, environment["gpu_name"])
    raw = None if arguments.again else load_raw(path, identity)
    if raw is None and path.exists():
        _say(f"{path}: {replaced(path, identity)}; its first run replaces it")
    return Row(
        peer.name,
        path,
        raw
        or {
            "schema": 1,
            "identity": identity,
            "title": peer.title(),
            "command": ["python", "-m", "benchmarks.compare", *sys.argv[1:]],
            "environment": environment,
            "flops_per_token": flops_per_token(job.shape, job.config.training.seq_len).torchtitan,
            "tokens_per_step": job.tokens_per_step,
            "notes": ours.notes(job) + peer.notes(job),
            "tries": [],
            "runs": [],
        },
    )


def replaced(path: Path, identity: dict[str, Any]) -> str:
    """Why what ``path`` holds does not count: the keys of its identity that differ, or none with --again."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["identity"]
    except (OSError, ValueError, KeyError):
        return "cannot be read"
    changed = [key for key, value in identity.items() if before.get(key) != value]
    return f"was measured with another {', '.join(changed)}" if changed else "is measured again"


def compare(workload: Workload, peers: list[Side], arguments: argparse.Namespace, machine: dict[str, Any]) -> bool:
    """Measure the rows of one workload; whether all of them have a ratio.

    Raises:
        ConfigError: a setting that is none.
        OutOfTime: the budget is spent.
    """
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        job = job_of(workload, arguments, "cuda" if machine["gpu_count"] else "cpu", Path(folder))
        ours, runs = Ours(), 1 if arguments.once else 2
        sides: dict[str, Side] = {"ours": ours} | {peer.name: peer for peer in peers}
        lists = {n: getattr(arguments, f"{n}_settings") or workload.settings[n] for n in sides}
        candidates = {name: parse_settings(lists[name], side, workload) for name, side in sides.items()}
        rows = [open_row(job, peer, ours, arguments, lists, machine) for peer in peers]
        unfinished = []
        for row in rows:
            if any(lacks(row.raw, side, runs) for side in ("ours", row.peer)):
                unfinished.append(row)
            else:
                print(f"Measured already: {row.path}", flush=True)
        try:
            if unfinished:
                print(f"{workload.name}: {', '.join(n for n in sides)}", flush=True)
                Session(
                    job, sides, unfinished, candidates, arguments.search == "best", runs, arguments.deadline, _say
                ).measure()
        finally:
            for row in rows:
                if row.raw["runs"]:
                    save_raw(row.path, row.raw)
                    print(sentence(row_of(row.raw, row.path.name)), flush=True)
        return all(row_of(row.raw, row.path.name)["ratio"] is not None for row in rows)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def check(arguments: argparse.Namespace, machine: dict[str, Any]) -> None:
    """ConfigError: numbers that cannot be."""
    if arguments.timed_steps < WINDOW or arguments.timed_steps % WINDOW:
        raise ConfigError(f"--timed_steps {arguments.timed_steps}: must be a multiple of {WINDOW}")
    there = machine["gpu_count"]
    if arguments.ngpu < 1:
        raise ConfigError(f"--ngpu {arguments.ngpu}: must be at least 1")
    if there and arguments.ngpu > there:
        raise ConfigError(f"--ngpu {arguments.ngpu}: this machine has {there} GPUs")


def main(argv: list[str] | None = None) -> int:
    """Measure what is asked for; return the exit code."""
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a stopped command ends its ranks
    arguments.deadline = time.monotonic() + arguments.budget_s
    try:
        wanted, here = wanted_rows(arguments), machine()
        check(arguments, here)
        arguments.commit = arguments.commit or commit()
        peers: dict[str, Side] = {p.name: p for p in (Torchtitan(arguments.peer_path), Transformers(), Arm())}
        absent = {name: why for name in {p for ps in wanted.values() for p in ps} if (why := peers[name].missing())}
        for why in absent.values():
            print(f"Left out: {why}", flush=True)
        whole = True
        for name, row_peers in wanted.items():
            present = [peers[p] for p in row_peers if p not in absent]
            if present:
                whole &= compare(WORKLOADS[name], present, arguments, here)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OutOfTime as error:
        print(f"Out of time: {error}. The same command goes on from here.", flush=True)
        return 1
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on from here.", flush=True)
        return 1
    return 1 if not whole else 3 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
