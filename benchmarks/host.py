"""What a training run costs the host: each step beside its kernels, its data, its start, and checking a question.

    python -m benchmarks.host --out FILE
    python -m benchmarks.host --only "loader;check" --out FILE

* ``step``: a whole training step, logging included, of a model so narrow that its kernels are nothing: 16 layers of
  width 16 on 16 tokens. What is left is Python and the queueing of kernels, or on a CPU the calls themselves. Run by
  train.py as any run; the median over its timed steps. With a GPU on both devices.
* ``loader``: tokens/s of one process that makes batches of 4 x 4096 tokens, without a model and without prefetching,
  for every packing, and for one of 8 data ranks, which must know the labels of all. It must exceed NEEDED.
* ``start``: seconds of each phase from the start of train.py to the end of the first step, with a warm cache of tokens.
* ``files``: knowing which content ``data.roots = ["site-packages"]`` has: every file read, and remembered.
* ``check``: ``python -m ablation check``, every question.

The JSON file is written after every row; the same command on the same machine measures what is missing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import save_raw
from benchmarks.run_files import metrics_lines, timed_steps
from benchmarks.side import ROOT
from benchmarks.two_ranks import only, write
from config.load import load_file
from data.build import build_data
from data.corpora import PythonCorpus
from trainer.environment import describe_environment

GPU_TOKENS_PER_S = 65_000
"""What the fastest GPU consumes: dense 1.50 B on an H200, rounded up (docs/performance.md)."""
NEEDED = 5 * GPU_TOKENS_PER_S
NARROW = {
    "model.dim": 16, "model.n_layers": 16, "model.n_heads": 2, "model.n_kv_heads": 2, "model.hidden_dim": 16,
    "model.vocab_size": 257, "model.max_seq_len": 16, "training.seq_len": 16, "training.local_batch_size": 1,
    "training.global_batch_size": 1, "data.tokenizer": "bytes", "validation.enable": False,
}  # fmt: skip
PACKINGS = ("split_fill", "next_fit", "first_fit_decreasing", "padded")

Measure = Callable[[Path, argparse.Namespace], dict[str, Any]]
"""(empty folder, options) -> the figures of a row."""


def rows(cuda: bool) -> dict[str, Measure]:
    """Name -> how it is measured. ``cuda``: with a GPU."""
    found: dict[str, Measure] = {}
    for device in ("cpu", "cuda")[: 1 + cuda]:
        for config in ("llama_debug", "debug_moe"):
            for compiled in (False, True):
                name = f"step, {config}{', compiled' * compiled}, {device}"
                found[name] = functools.partial(step, config=config, compiled=compiled, device=device)
    for packing in PACKINGS:
        found[f"loader, {packing}"] = functools.partial(loader, packing=packing, ranks=1)
    found["loader, split_fill, 1 of 8 ranks"] = functools.partial(loader, packing="split_fill", ranks=8)
    found["start"] = start
    found["files"] = files
    found["check"] = check
    return found


def step(folder: Path, options: argparse.Namespace, config: str, compiled: bool, device: str) -> dict[str, Any]:
    """Milliseconds of a step: the median, and what a tenth and nine tenths of the steps stay below."""
    changes = NARROW | {"training.steps": options.steps, "compile.enable": compiled, "job.run_dir": str(folder / "run")}
    _train(config, changes, device)
    seconds = sorted(s for _, s in timed_steps(metrics_lines(folder / "run")))
    low, middle, high = (1e3 * seconds[int(share * len(seconds))] for share in (0.1, 0.5, 0.9))
    return {"ms": middle, "ms_10_90": [low, high], "steps": len(seconds)}


def _train(config: str, changes: dict[str, Any], device: str, *program: str) -> str:
    """Train by train.py, or by ``program``; what it printed. RuntimeError: it failed."""
    words = [sys.executable, *(program or ("train.py",)), "--job.config_file", f"train_configs/{config}.toml"]
    for key, value in changes.items():
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    done = subprocess.run(words, cwd=ROOT, env=environment, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1])
    return done.stdout


def loader(folder: Path, options: argparse.Namespace, packing: str, ranks: int) -> dict[str, Any]:
    """Tokens/s of one data rank, and how many times what must be exceeded."""
    overrides = {
        "data.packing": packing,
        "data.document_mask": True,
        "data.prefetch_steps": 0,
        "training.local_batch_size": options.sequences,
        "training.seq_len": options.seq_len,
        "training.global_batch_size": options.sequences * ranks,
    }
    config = load_file(ROOT / "benchmarks/configs/dense_1b.toml", overrides).config
    config.data.tokenizer = options.tokenizer
    pipeline = build_data(config, dp_rank=0, dp_degree=ranks)
    for _ in range(3):
        pipeline.train.next_step()
    begun, steps = time.perf_counter(), 0
    while time.perf_counter() - begun < options.loader_s:
        pipeline.train.next_step()
        steps += 1
    rate = steps * options.sequences * options.seq_len / (time.perf_counter() - begun)
    pipeline.close()
    return {"tokens_per_s": rate, "times_needed": rate / NEEDED}


def start(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Phases of a start in seconds, the fastest of three: what else the machine did is not the start's."""
    tries = []
    for number in range(3):
        changes = NARROW | {"training.steps": 1, "job.run_dir": str(folder / f"run{number}")}
        begun = time.time()
        said = _train("llama_debug", changes, "cpu", "-m", "benchmarks.start_phases", str(begun))
        tries.append(json.loads(said.strip().splitlines()[-1]))
    return {"phases_s": min(tries, key=lambda phases: sum(phases.values()))}


def files(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to know the content of the standard library and all packages, the page cache warm."""
    corpus, seconds = PythonCorpus(["site-packages"]), []
    for cache in (None, None, folder, folder, folder):
        begun = time.perf_counter()
        corpus.fingerprint(cache)
        seconds.append(time.perf_counter() - begun)
    found = list(corpus._files())
    size = sum(os.stat(path).st_size for _, path in found)
    return {"files": len(found), "bytes": size, "read_s": seconds[1], "remembered_s": min(seconds[3:])}


def check(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of checking every question, the fastest of three."""
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ablation", "check"], cwd=ROOT, check=True, capture_output=True)
        seconds.append(time.perf_counter() - begun)
    questions = len(list((ROOT / "train_configs" / "ablations").glob("*.toml")))
    return {"s": min(seconds), "questions": questions}


def said(row: dict[str, Any]) -> str:
    """The figures of a row in words."""
    if "error" in row:
        return row["error"]
    if "ms" in row:
        return f"{row['ms']:.1f} ms a step ({row['ms_10_90'][0]:.1f} to {row['ms_10_90'][1]:.1f})"
    if "tokens_per_s" in row:
        return f"{row['tokens_per_s']:,.0f} tokens/s, {row['times_needed']:.1f} x what is needed ({NEEDED:,})"
    if "phases_s" in row:
        phases = row["phases_s"]
        return f"{sum(phases.values()):.2f} s: " + ", ".join(f"{name} {s:.2f}" for name, s in phases.items())
    if "read_s" in row:
        what = f"{row['files']:,} files, {row['bytes'] / 1e6:,.0f} MB"
        return f"{what}: read {row['read_s']:.2f} s, remembered {row['remembered_s']:.2f} s"
    return f"{row['s']:.2f} s for {row['questions']} questions"


def page(report: dict[str, Any]) -> str:
    """The table as Markdown."""
    environment = report["environment"]
    machine = f"{environment['cpu']}, {environment['cores']} cores, Python {environment['python']}"
    lines = [f"| {name} | {said(row).replace('|', '/')} |" for name, row in report["rows"].items()]
    head = f"# Host\n\n{machine}, torch {environment['torch']}. Load when begun: {report['load']:.1f}.\n\n"
    return head + "| row | found |\n|---|---|\n" + "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing. Exit code: 0 all there, 1 out of time, or the loader is too slow."""
    known = rows(torch.cuda.is_available())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = list(dict.fromkeys(name.split(",")[0] for name in known))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "host", help="without a suffix")
    parser.add_argument("--only", default="", metavar="A;B", help=f"of {'; '.join(kinds)}")
    parser.add_argument("--budget_s", type=float, default=float("inf"), help="seconds after which nothing is begun")
    parser.add_argument("--steps", type=int, default=60, help="of a run")
    parser.add_argument("--loader_s", type=float, default=5.0, help="seconds of each loader")
    parser.add_argument("--sequences", type=int, default=4, help="of a batch of the loader")
    parser.add_argument("--seq_len", type=int, default=4096, help="of the loader")
    parser.add_argument("--tokenizer", choices=("bpe", "bytes"), default="bpe", help="of the loader")
    options = parser.parse_args(argv)
    chosen = only(parser, options, kinds)
    until, longest, code = time.monotonic() + options.budget_s, 0.0, 0
    report = _report(options)
    for name, measure in known.items():
        if name.split(",")[0] not in chosen or "error" not in report["rows"].get(name, {"error": ""}):
            continue
        begun = time.monotonic()
        if begun + longest > until:
            print(f"out of time before {name}: the same command goes on")
            code = 1
            break
        with tempfile.TemporaryDirectory(prefix="host-") as folder:
            try:
                row = measure(Path(folder), options)
            except Exception as error:
                row = {"error": f"{type(error).__name__}: {error}"[:2000]}
        report["rows"][name] = row
        save_raw(options.out.with_suffix(".json"), report)
        longest = max(longest, time.monotonic() - begun)
        print(f"{name}: {said(row)}", flush=True)
    write(options.out, report, page(report))
    slow = [name for name, row in report["rows"].items() if row.get("times_needed", 1.0) < 1.0]
    for name in slow:
        print(f"{name}: below {NEEDED:,} tokens/s", file=sys.stderr)
    return 1 if slow else code


def _report(options: argparse.Namespace) -> dict[str, Any]:
    """A new report, with the rows of the file that --out names if they are of this machine."""
    environment, _ = describe_environment(ROOT, deterministic=False)
    report: dict[str, Any] = {
        "command": ["python", "-m", "benchmarks.host", *sys.argv[1:]],
        "environment": environment,
        "load": os.getloadavg()[0],
        "rows": {},
    }
    try:
        before = json.loads(options.out.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return report
    if all(before["environment"][key] == environment[key] for key in ("cpu", "cores", "python", "torch", "gpu_name")):
        report["rows"] = before["rows"]
    return report


if __name__ == "__main__":
    sys.exit(main())
