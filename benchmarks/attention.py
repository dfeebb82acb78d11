"""How fast is each attention backend on this GPU?

    python -m benchmarks.attention --out attention.json

Every backend that runs here attends to the same random bfloat16 queries, keys and values: causal over whole sequences,
and packed, with documents of log-normal lengths (median 600 tokens) end to end. A time is one call between two CUDA
events, after a buffer larger than the cache was written; the median over rounds that alternate between backends, so
that a clock that drifts hits all. FLOPs are those of the pairs a query may see, 4 D a pair forward, 10 D backward; of
a packed row, the pairs within documents. ``prepare`` is what a forward pass of a whole model pays once. A backend that
fails is reported, and the rest goes on; one above the card's peak is a measuring error and is reported as failed.
"""

import argparse
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import titan
from benchmarks.timing import CACHE_BYTES, peak_gib, time_ms
from config.attention import KERNELS
from model.attention import attention_backend
from model.attention_choice import machine
from trainer.environment import describe_environment

SHAPES = ("4x4096", "2x8192", "1x32768")
PEER = "sdpa_cudnn"
"""Ratios are against this one."""


def document_starts(rows: int, length: int) -> torch.Tensor:
    """int32 (rows, M) on the GPU: where each document of a row begins, then ``length``."""
    generator = torch.Generator().manual_seed(5)
    starts = []
    for _ in range(rows):
        lengths = (torch.randn(length // 64, generator=generator) + 6.4).exp().clamp(min=16).int()  # e^6.4 = 602
        begins = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
        starts.append(begins[begins < length])
    most = 1 << max(3, (max(map(len, starts)) - 1).bit_length())
    padded = [torch.nn.functional.pad(row, (0, most - len(row)), value=length) for row in starts]
    return torch.stack(padded).int().cuda()


def document_ids(starts: torch.Tensor, length: int) -> torch.Tensor:
    """int32 (rows, length): the document of each token."""
    places = torch.arange(length, device=starts.device, dtype=torch.int32).expand(len(starts), -1).contiguous()
    return (torch.searchsorted(starts, places, right=True) - 1).int()


def pairs(starts: torch.Tensor | None, rows: int, length: int) -> int:
    """Query and key pairs that may be seen, of one head."""
    if starts is None:
        return rows * length * (length + 1) // 2
    lengths = torch.diff(torch.nn.functional.pad(starts, (0, 1), value=length), dim=1).long()
    return int((lengths * (lengths + 1) // 2).sum())


def calls_of(
    name: str, leaves: list[torch.Tensor], dout: torch.Tensor, ids: torch.Tensor | None, starts: torch.Tensor | None
) -> dict[str, Callable[[], Any]]:
    """What is timed of a backend."""
    backend = attention_backend(name)
    tokens = torch.zeros(leaves[0].shape[:2], dtype=torch.long, device=leaves[0].device)
    mask = backend.prepare(ids, starts, tokens)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return backend(*leaves, mask)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(backend(*leaves, mask), leaves, dout)

    calls: dict[str, Callable[[], Any]] = {"forward": forward, "forward and backward": both}
    if ids is not None:
        calls["prepare"] = lambda: backend.prepare(ids, starts, tokens)
    return calls


def measure(names: list[str], shape: str, packed: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One table: every backend on one shape."""
    rows, length = map(int, shape.split("x"))
    generator = torch.Generator("cuda").manual_seed(3)
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    tensors = [
        torch.randn(rows, length, h, options.head_dim, device="cuda", generator=generator).bfloat16() for h in heads
    ]
    leaves, dout = [x.requires_grad_() for x in tensors[:3]], tensors[3]
    starts = document_starts(rows, length) if packed else None
    ids = None if starts is None else document_ids(starts, length)
    seen = pairs(starts, rows, length)
    flops = {"forward": 4 * options.heads * options.head_dim * seen}
    flops["forward and backward"] = flops["forward"] * 7 // 2
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
    table: dict[str, Any] = {"shape": shape, "packed": packed, "pairs_of_a_head": seen, "backends": {}, "failed": {}}
    if starts is not None:
        table["documents"] = int((starts < length).sum())

    ready: dict[str, dict[str, Callable[[], Any]]] = {}
    first: list[torch.Tensor] = []
    for name in names:
        try:
            calls = calls_of(name, leaves, dout, ids, starts)
            for call in calls.values():
                for _ in range(3):
                    call()
            results = [calls["forward"](), *calls["forward and backward"]()]
            first = first or results
            differences = [
                float((a - b).float().norm() / b.float().norm()) for a, b in zip(results, first, strict=True)
            ]
            table["backends"][name] = {
                "difference_to_the_first": differences,
                "peak_gib": peak_gib(calls["forward and backward"]),
                "times_ms": {kind: [] for kind in calls},
            }
            ready[name] = calls
        except Exception as error:
            _failed(table, name, error)
    for turn in range(options.rounds):
        for name in list(ready)[:: 1 if turn % 2 == 0 else -1]:
            for kind, call in ready[name].items():
                table["backends"][name]["times_ms"][kind] += time_ms(call, options.repeats, cache=cache)
    peak = titan.peak_flops(torch.cuda.get_device_name())
    for name in list(ready):
        row = table["backends"][name]
        row["ms"] = {kind: statistics.median(times) for kind, times in row["times_ms"].items()}
        row["tflops"] = {kind: flops[kind] / row["ms"][kind] / 1e9 for kind in flops}
        if peak is not None and max(row["tflops"].values()) * 1e12 > peak:
            table["failed"][name] = f"measuring error: {row['tflops']} TFLOP/s, above the card's {peak / 1e12:.0f}"
            del table["backends"][name]
    return table


def _failed(table: dict[str, Any], name: str, error: Exception) -> None:
    table["failed"][name] = f"{type(error).__name__}: {error}"[:2000]
    traceback.print_exc()
    torch.cuda.empty_cache()


def show(table: dict[str, Any]) -> None:
    """Print a table."""
    documents = f", {table['documents']} documents" if table["packed"] else ""
    print(f"\n{table['shape']} {'packed' if table['packed'] else 'causal'}{documents}")
    print(f"{'':12} {'forward':>20} {'forward + backward':>22} {'prepare':>10} {'peak GiB':>9} {'x ' + PEER:>12}")
    peer = table["backends"].get(PEER)
    for name, row in sorted(table["backends"].items(), key=lambda item: item[1]["ms"]["forward and backward"]):
        ms, rate, both = row["ms"], row["tflops"], "forward and backward"
        prepare = f"{ms['prepare']:.3f} ms" if "prepare" in ms else ""
        ratio = f"{peer['ms'][both] / ms[both]:.2f}" if peer else ""
        print(
            f"{name:12} {ms['forward']:8.3f} ms {rate['forward']:4.0f} TF/s {ms[both]:10.3f} ms {rate[both]:4.0f} TF/s"
            f" {prepare:>10} {row['peak_gib']:9.2f} {ratio:>12}"
        )
    for name, why in table["failed"].items():
        print(f"{name:12} {why.splitlines()[0]}")


def main() -> int:
    """Measure, print tables and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "attention.json")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="sequences x tokens")
    parser.add_argument("--backends", nargs="+", choices=KERNELS, default=[n for n in KERNELS if n != "sdpa_math"])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv_heads", type=int, default=16)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This measures CUDA kernels, and this machine has no GPU.", file=sys.stderr)
        return 2
    environment, _ = describe_environment(Path(__file__).resolve().parent.parent, deterministic=False)
    here = machine("cuda")
    report: dict[str, Any] = {
        "command": sys.argv,
        "environment": environment,
        "shape": {name: getattr(options, name) for name in ("heads", "kv_heads", "head_dim", "rounds", "repeats")},
        "not_here": dict(here.missing),
        "tables": [],
    }
    names = [name for name in options.backends if name not in here.missing]
    for shape in options.shapes:
        for packed in (False, True):
            fitting = [name for name in names if KERNELS[name].document_mask or not packed]
            report["tables"].append(measure(fitting, shape, packed, options))
            show(report["tables"][-1])
            torch.cuda.empty_cache()
            torch.compiler.reset()  # a training run has one shape, and compiles for a handful at most
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")  # what is done is not lost
    for name, problem in here.missing.items():
        print(f"\nNot measured: {name}: {problem}")
    print(f"Written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
