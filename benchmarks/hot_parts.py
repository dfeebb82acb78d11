"""How far is each hot part of a training step from what this device can do?

    python -m benchmarks.hot_parts --out FILE
    python -m benchmarks.hot_parts --only "experts;expert product" --workloads moe_7b --budget_s 300 --out FILE

Parts (benchmarks/parts.py) have the shapes of the workloads of the speed table, on one GPU. A row's floor is the larger
of its bytes over the rate of one large copy and its FLOPs over the rate of one large bfloat16 product, both measured in
the same run; its ratio says how many times its floor it takes. Times are medians of CUDA events, after warm-up, queued
ahead of the device, on inputs larger than its cache or several sets of them in turn.

The JSON file is written after every row. The same command with the same GPU and torch goes on where it stopped; a row
that failed is measured again when --only names its part. Nothing is begun that would not end in --budget_s, by the
longest row so far.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.part import Row, setting_of
from benchmarks.parts import PARTS, rows_of
from benchmarks.rows import save_raw
from benchmarks.timing import CACHE_BYTES, ceilings, median_ms, synchronize
from benchmarks.two_ranks import only, write
from benchmarks.workloads import WORKLOADS
from trainer.environment import describe_environment

SHAPES = ("moe_7b", "dense_8b", "dense_1b")
"""Workloads that differ in shape."""
MOST_SETS = 4
"""Sets of inputs that are taken in turn."""
TINY_CEILINGS = {"copy_bytes": 2**20, "product_size": 128}


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing and write the table. Exit code: 0 all there, 1 the same command goes on."""
    options, parts = _options(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    if device.type == "cpu" and not options.cpu:
        print("This measures a GPU, and this machine has none. --cpu shows that it works.", file=sys.stderr)
        return 2
    until = time.monotonic() + options.budget_s
    limits = ceilings(device, **(TINY_CEILINGS if options.cpu else {}))
    report = _report(options, device, limits)
    settings = [setting_of(name, device, options.compile_backend) for name in options.workloads]
    chosen = [row for setting in settings for row in rows_of(setting) if row.part in parts]
    longest, code = 0.0, 0
    for row in chosen:
        if row.name in report["rows"] and not (options.only and "error" in report["rows"][row.name]):
            continue
        begun = time.monotonic()
        if begun + longest > until:
            print(f"out of time before {row.name}: the same command goes on")
            code = 1
            break
        report["rows"][row.name] = found = measure(row, limits, device, options.repeats)
        save_raw(options.out.with_suffix(".json"), report)
        longest = max(longest, time.monotonic() - begun)
        print(line(row.name, found), flush=True)
        if not _alive(device):
            print("the device no longer answers: the same command goes on in a new process")
            code = 1
            break
    write(options.out, report, page(report))
    return code


def measure(row: Row, limits: dict[str, float], device: torch.device, repeats: int) -> dict[str, Any]:
    """The figures of a row, or ``error``."""
    work = row.work
    floors = {
        "bytes": 1e3 * work.bytes / limits["bytes_per_s"],
        "FLOPs": 1e3 * work.flops / limits["flops_per_s"],
    }
    kind = max(floors, key=lambda name: floors[name])
    found: dict[str, Any] = {"workload": row.workload, "part": row.part, "variant": row.variant, "passes": row.passes}
    found |= {"bytes": work.bytes, "flops": work.flops, "floor": kind, "floor_ms": floors[kind], "limits": limits}
    try:
        generator = torch.Generator(device).manual_seed(7)
        sets = max(1, min(MOST_SETS, math.ceil(CACHE_BYTES / work.bytes)))
        calls = [work.call(generator) for _ in range(sets)]
        ms = median_ms(calls, repeats, device)
        found |= {"ms": ms, "ratio": ms / floors[kind], "sets": sets}
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
        traceback.print_exc()
    calls = []
    torch.compiler.reset()  # a training run has one shape
    if device.type == "cuda" and _alive(device):
        gc.collect()  # optimizers and compiled functions lie in cycles, with gigabytes in them
        torch.cuda.empty_cache()
    return found


def line(name: str, row: dict[str, Any]) -> str:
    """A row for the eye."""
    if "error" in row:
        return f"{name}: {row['error'].splitlines()[0]}"
    return f"{name}: {row['ms']:.3f} ms, {row['ratio']:.2f} x its floor of {row['floor_ms']:.3f} ms ({row['floor']})"


def page(report: dict[str, Any]) -> str:
    """The table as Markdown, a section a workload."""
    environment = report["environment"]
    text = [f"# Hot parts beside their floors\n\n{environment['gpu_name'] or 'CPU'}, torch {environment['torch']}."]
    for workload in dict.fromkeys(row["workload"] for row in report["rows"].values()):
        text.append(f"\n## {workload}\n\n| part | variant | passes | ms | floor ms | floor | ratio |")
        text.append("|---|---|---|---|---|---|---|")
        for row in report["rows"].values():
            if row["workload"] == workload:
                label = f"| {row['part']} | {row['variant']} | {row['passes']} |"
                if "error" in row:
                    reason = row["error"].splitlines()[0].replace("|", "/")
                    text.append(f"{label} {reason} | {row['floor_ms']:.3f} | {row['floor']} | |")
                else:
                    figures = f"{row['ms']:.3f} | {row['floor_ms']:.3f} | {row['floor']} | {row['ratio']:.2f}"
                    text.append(f"{label} {figures} |")
    return "\n".join(text) + "\n"


def _options(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hot_parts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = Path(os.environ.get("OUT", ".")) / "hot_parts"
    parser.add_argument("--out", type=Path, default=out, help="without a suffix: .json, which is gone on with, and .md")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=SHAPES)
    parser.add_argument("--only", default="", metavar="A;B", help=f"of {'; '.join(PARTS)}")
    parser.add_argument("--budget_s", type=float, default=float("inf"), help="seconds after which nothing is begun")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls of a row")
    parser.add_argument("--compile_backend", default="inductor")
    parser.add_argument("--cpu", action="store_true", help="on the CPU: whether it works, not how fast anything is")
    options = parser.parse_args(argv)
    return options, only(parser, options, PARTS)


def _report(options: argparse.Namespace, device: torch.device, limits: dict[str, float]) -> dict[str, Any]:
    """A new report, with the rows of the file that --out names if they are from a machine like this."""
    environment, _ = describe_environment(Path(__file__).resolve().parents[1], deterministic=False)
    report: dict[str, Any] = {
        "command": ["python", "-m", "benchmarks.hot_parts", *sys.argv[1:]],
        "environment": environment,
        "limits": limits,
        "rows": {},
    }
    try:
        before = json.loads(options.out.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return report
    same = all(before["environment"][key] == environment[key] for key in ("gpu_name", "torch"))
    if same:
        report["rows"] = before["rows"]
    else:
        print(f"{options.out}.json is from another GPU or torch: measured anew")
    return report


def _alive(device: torch.device) -> bool:
    """Whether the device still answers: an illegal access ends its context."""
    try:
        synchronize(device)
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
