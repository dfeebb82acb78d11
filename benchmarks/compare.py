"""Ours and a peer on one shape and the same GPUs, in ABBA order, every figure from the trainers' own records.

    python -m benchmarks.compare dense_1b --ngpu 2 --peer_path SITE --out benchmarks/results/dense_1b.json

``--peer_path`` is a folder that holds torchtitan 0.2.2 (pip install --target SITE --no-deps torchtitan==0.2.2). Each
side runs ``--steps`` steps; the first ``WARM_UP`` are left out. Step times of ours are those of metrics.jsonl;
torchtitan prints tokens/s over windows of 5 steps. The ratio is that of the medians of tokens/s a GPU. A side that
fails is reported, and the file is written with what there is.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5
WINDOW = 5
PEER_TEXT = 40_000_000
"""Characters of text the peer gets: more than it reads, and quickly loaded."""


@dataclass(frozen=True)
class Workload:
    """One shape under both trainers, with equal tokens an optimizer step."""

    name: str
    config: str
    """Our TOML, relative to the checkout."""
    torchtitan: tuple[str, ...]
    """torchtitan's model, flavor and switches."""
    seq_len: int
    local_batch_size: int


WORKLOADS = {
    w.name: w
    for w in [
        Workload(
            "dense_1b",
            "benchmarks/configs/dense_1b.toml",
            ("--model.name", "llama3", "--model.flavor", "1B_untied", "--compile.enable",
             "--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"),
            seq_len=4096,
            local_batch_size=4,
        ),
    ]
}  # fmt: skip


def torchrun(ngpu: int) -> list[str]:
    """The launcher both sides use."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ngpu}"]


def run_ours(w: Workload, ngpu: int, steps: int, work: Path, extra: list[str]) -> dict[str, Any]:
    """One run of this trainer: step times, losses and memory as its run directory holds them."""
    run_dir = work / f"ours-{time.time_ns()}"
    command = [
        *torchrun(ngpu), "train.py", "--job.config_file", w.config, "--job.run_dir", str(run_dir),
        "--training.steps", str(steps), "--training.seq_len", str(w.seq_len),
        "--training.local_batch_size", str(w.local_batch_size),
        "--training.global_batch_size", str(w.local_batch_size * ngpu), "--metrics.log_freq", str(WINDOW), *extra,
    ]  # fmt: skip
    log = execute(command, ROOT, dict(os.environ))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "step_times_s" in line]
    times = [t for line in lines for t in line["step_times_s"]]
    tokens = w.local_batch_size * w.seq_len
    last = lines[-1]
    return {
        "command": shown(command),
        "step_times_s": times,
        "tokens_per_s": [tokens / t for t in times[WARM_UP:]],
        "losses": {line["step"]: line["loss_metrics/global_avg_loss"] for line in lines},
        "tflops": last["tflops"],
        "mfu": last["mfu(%)"],
        "reserved_gib": max(line["memory/max_reserved(GiB)"] for line in lines),
        "log_tail": log[-1500:],
    }


STEP = re.compile(
    r"step:\s*(\d+)\s+loss:\s*([\d.naif]+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)\s+tflops:\s*([\d,.]+)\s+mfu:\s*([\d.]+)%"
)


def run_torchtitan(w: Workload, ngpu: int, steps: int, work: Path, peer_path: str, assets: Path) -> dict[str, Any]:
    """One run of torchtitan 0.2.2: its own log lines."""
    command = [
        *torchrun(ngpu), "--local-ranks-filter", "0", "--role", "rank", "--tee", "3",
        str(ROOT / "benchmarks/torchtitan_peer.py"), *w.torchtitan, "--model.hf_assets_path", "tests/assets/tokenizer",
        "--training.dataset", "c4_test", "--training.steps", str(steps), "--training.seq_len", str(w.seq_len),
        "--training.local_batch_size", str(w.local_batch_size), "--metrics.log_freq", str(WINDOW),
        "--lr_scheduler.warmup_steps", "2", "--optimizer.lr", "3e-4", "--debug.seed", "0",
    ]  # fmt: skip
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([peer_path, environment.get("PYTHONPATH", "")])
    log = execute(command, assets, environment)
    found = [m.groups() for m in map(STEP.search, re.sub(r"\x1b\[[0-9;]*m", "", log).splitlines()) if m]
    timed = [f for f in found if int(f[0]) > WARM_UP + WINDOW - 1]
    return {
        "command": shown(command),
        "tokens_per_s": [float(f[3].replace(",", "")) for f in timed],
        "losses": {int(f[0]): float(f[1]) for f in found},
        "tflops": statistics.median(float(f[4].replace(",", "")) for f in timed),
        "mfu": statistics.median(float(f[5]) for f in timed),
        "reserved_gib": max(float(f[2]) for f in found),
        "log_tail": log[-1500:],
    }


def execute(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run to the end and return what was printed; RuntimeError with its tail when it fails."""
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} of {' '.join(command)}\n{done.stdout[-4000:]}")
    return done.stdout


def shown(command: list[str]) -> list[str]:
    """A command as it reads in the checkout's folder."""
    return [word.replace(f"{ROOT}{os.sep}", "") for word in command]


def peer_assets(folder: Path, config_file: str) -> Path:
    """A working folder for torchtitan with the text and the tokenizer that our run of ``config_file`` reads."""
    from config.load import load_file
    from data.build import build_data
    from data.sources import open_sources
    from data.tokenizers import END_OF_TEXT

    assets = folder / "tests" / "assets"
    (assets / "c4_test").mkdir(parents=True)
    (assets / "tokenizer").mkdir()
    config = load_file(ROOT / config_file).config
    written = 0
    with open(assets / "c4_test" / "data.json", "w", encoding="utf-8") as file:
        for source in open_sources(config.data):
            for document in source.corpus.documents():
                written += file.write(json.dumps({"text": document.text}) + "\n")
                if written > PEER_TEXT:
                    break
    tokenizer = build_data(config, dp_rank=0, dp_degree=1).tokenizer
    tokenizer.save(assets / "tokenizer" / "tokenizer.json")  # type: ignore[attr-defined]
    special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def head() -> str:
    """The commit that is checked out, or "unknown"."""
    done = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def median(run: dict[str, Any]) -> float:
    """Tokens/s a GPU of one run."""
    return statistics.median(run["tokens_per_s"])


def main() -> int:
    """Measure, write JSON, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--ngpu", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--order", default="BAAB", help="A: ours, B: the peer")
    parser.add_argument("--peer_path", required=True, help="folder that holds torchtitan 0.2.2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default=head(), help="of the checkout, where git is not at hand")
    parser.add_argument("extra", nargs="*", help="further options of our side, after --")
    arguments = parser.parse_args()
    w = WORKLOADS[arguments.workload]
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        assets = peer_assets(work / "peer", w.config)
        for side in arguments.order:
            try:
                if side == "A":
                    run = run_ours(w, arguments.ngpu, arguments.steps, work, arguments.extra)
                else:
                    run = run_torchtitan(w, arguments.ngpu, arguments.steps, work, arguments.peer_path, assets)
                speed = f"{median(run):,.0f} tokens/s/GPU, {run['tflops']:.0f} TFLOP/s"
                print(f"{side}: {speed}, {run['reserved_gib']:.1f} GiB", flush=True)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                run = {"error": str(error)}
                print(f"{side}: failed\n{error}")
            runs.append({"side": side, **run})
            arguments.out.write_text(json.dumps({"row": row(w, runs, arguments), "runs": runs}, indent=1))
    print(json.dumps(row(w, runs, arguments), indent=1))
    return 0 if all("error" not in run for run in runs) else 1


def row(w: Workload, runs: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """The table row: medians of each side over its runs, and their ratio."""
    import torch

    sides: dict[str, dict[str, Any]] = {}
    for side, name in (("A", "ours"), ("B", "peer")):
        good = [run for run in runs if run["side"] == side and "error" not in run]
        if good:
            sides[name] = {
                "tokens_per_s": statistics.median(median(run) for run in good),
                "tflops": statistics.median(run["tflops"] for run in good),
                "mfu": statistics.median(run["mfu"] for run in good),
                "reserved_gib": max(run["reserved_gib"] for run in good),
            }
    ratio = sides["ours"]["tokens_per_s"] / sides["peer"]["tokens_per_s"] if len(sides) == 2 else None
    return {
        "workload": w.name,
        "peer": "torchtitan 0.2.2",
        "ratio": ratio,
        **{f"{name}_{key}": value for name, figures in sides.items() for key, value in figures.items()},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "ngpu": arguments.ngpu,
        "torch": torch.__version__,
        "commit": arguments.commit,
        "raw": arguments.out.name,
    }


if __name__ == "__main__":
    sys.exit(main())
