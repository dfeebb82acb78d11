"""What does each loss cost on this GPU, in time and memory?

    python -m benchmarks.loss --out loss.json

Head and cross entropy, forward and backward, of random bfloat16 hidden states and a bfloat16 matrix, as FSDP2 gathers
it; each implementation of ``loss.implementation`` eager and with "loss" compiled, where that changes it. A time is one
call between two CUDA events, after a buffer larger than the cache was written; the median over rounds that alternate
between implementations. Peaks are beyond hidden states and matrix and count their gradients, beside what
config/loss.py computes. The difference is that of the gradient of the matrix to the first implementation that ran.
One that fails, or is above the card's peak, is reported, and the rest goes on.
"""

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

import titan
from benchmarks.timing import CACHE_BYTES, peak_gib, time_ms
from config.keys import all_keys
from config.loss import BY_SWITCH, liger_chunk, loss_peak_bytes
from config.schema import Config
from model.loss_choice import loss_of
from trainer.environment import describe_environment

NAMES = [name for kind in get_args(all_keys()["loss.implementation"].type) for name in get_args(kind)]
PRODUCTS = {"vocab_chunked": 4}
"""Products of hidden states, matrix and logits; 3 for the others."""


def rows_of(names: list[str]) -> list[tuple[str, bool]]:
    """(implementation, compiled) of each row of a table."""
    return [(name, compiled) for name in names for compiled in (False, True) if not (compiled and _own_kernel(name))]


def _own_kernel(name: str) -> bool:
    return name in BY_SWITCH.values()


def chunk_of(name: str, options: argparse.Namespace, vocab: int) -> int:
    """Rows or columns of a chunk; of the rows all where logits are whole."""
    chunks = {"row_chunked": options.rows_per_chunk, "vocab_chunked": options.columns_per_chunk}
    if name == "liger_fused_linear":
        return liger_chunk(options.tokens, vocab, options.dim)
    return chunks.get(name, options.tokens)


def call_of(
    name: str, compiled: bool, options: argparse.Namespace, inputs: list[torch.Tensor], backend: str = "inductor"
) -> Callable[[], Any]:
    """Loss and both gradients; ``backend`` of torch.compile."""
    config = Config()
    config.loss.implementation = name
    config.loss.rows_per_chunk, config.loss.columns_per_chunk = options.rows_per_chunk, options.columns_per_chunk
    loss = loss_of(config)
    if compiled:
        loss.compile(functools.partial(torch.compile, backend=backend))
    hidden, weight, labels = inputs

    def both() -> tuple[torch.Tensor, ...]:
        value = loss(hidden, weight, labels)
        return value.detach(), *torch.autograd.grad(value / options.tokens, (hidden, weight))

    return both


def measure(vocab: int, options: argparse.Namespace) -> dict[str, Any]:
    """One table."""
    generator = torch.Generator("cuda").manual_seed(3)
    hidden, weight = (
        torch.randn(*size, device="cuda", generator=generator).bfloat16().requires_grad_()
        for size in ((1, options.tokens, options.dim), (vocab, options.dim))
    )
    labels = torch.randint(0, vocab, (1, options.tokens), device="cuda", generator=generator)
    with torch.no_grad():
        weight.mul_(options.dim**-0.5)  # logits of variance 1
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
    table: dict[str, Any] = {"vocab": vocab, "rows": {}, "failed": {}}
    ready: dict[str, Callable[[], Any]] = {}
    first: torch.Tensor | None = None
    for name, compiled in rows_of(options.losses):
        label = f"{name}, compiled" if compiled else name
        try:
            call = call_of(name, compiled, options, [hidden, weight, labels])
            for _ in range(3):
                call()
            value, _, by_weight = call()
            first = by_weight if first is None else first
            formula = loss_peak_bytes(
                name,
                tokens=options.tokens,
                vocab=vocab,
                dim=options.dim,
                chunk=chunk_of(name, options, vocab),
                compiled=compiled,
            )
            table["rows"][label] = {
                "loss": float(value) / options.tokens,
                "difference_to_the_first": float((by_weight - first).float().norm() / first.float().norm()),
                "formula_gib": formula / 2**30,
                "products": PRODUCTS.get(name, 3),
                "times_ms": [],
            }
            del value, by_weight
            table["rows"][label]["peak_gib"] = peak_gib(call)
            ready[label] = call
        except Exception as error:
            table["failed"][label] = f"{type(error).__name__}: {error}"[:2000]
            table["rows"].pop(label, None)
            torch.cuda.empty_cache()
    for turn in range(options.rounds):
        for label in list(ready)[:: 1 if turn % 2 == 0 else -1]:
            table["rows"][label]["times_ms"] += time_ms(ready[label], options.repeats, cache=cache)
    peak = titan.peak_flops(torch.cuda.get_device_name())
    for label in list(ready):
        row = table["rows"][label]
        row["ms"] = statistics.median(row["times_ms"])
        row["tflops"] = 2 * row["products"] * options.tokens * options.dim * vocab / row["ms"] / 1e9
        if peak is not None and row["tflops"] * 1e12 > peak:
            table["failed"][label] = f"measuring error: {row['tflops']:.0f} TFLOP/s, above the card's peak"
            del table["rows"][label]
    return table


def show(table: dict[str, Any], tokens: int, dim: int) -> None:
    """Print a table."""
    print(f"\n{tokens} tokens, dim {dim}, vocabulary {table['vocab']}")
    print(f"{'':24} {'ms':>8} {'TF/s':>6} {'peak GiB':>9} {'formula':>8} {'loss':>10} {'difference':>11}")
    for label, row in table["rows"].items():
        print(
            f"{label:24} {row['ms']:8.2f} {row['tflops']:6.0f} {row['peak_gib']:9.2f} {row['formula_gib']:8.2f}"
            f" {row['loss']:10.5f} {row['difference_to_the_first']:11.1e}"
        )
    for label, why in table["failed"].items():
        print(f"{label:24} {why.splitlines()[0]}")


def main() -> int:
    """Measure, print tables and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "loss.json")
    parser.add_argument("--losses", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=[32_000, 128_256])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--rows_per_chunk", type=int, default=Config().loss.rows_per_chunk)
    parser.add_argument("--columns_per_chunk", type=int, default=Config().loss.columns_per_chunk)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("This measures memory and time of a GPU, and this machine has none.", file=sys.stderr)
        return 2
    environment, _ = describe_environment(Path(__file__).resolve().parent.parent, deterministic=False)
    report: dict[str, Any] = {
        "command": sys.argv,
        "environment": environment,
        "options": {k: v for k, v in vars(options).items() if k != "out"},
        "tables": [],
    }
    for vocab in options.vocabularies:
        report["tables"].append(measure(vocab, options))
        show(report["tables"][-1], options.tokens, options.dim)
        torch.cuda.empty_cache()
        torch.compiler.reset()  # a training run has one vocabulary
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")  # what is done is not lost
    print(f"Written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
