"""Each pass that moves rows to experts and back, by Triton kernels and by torch, beside the time its bytes take.

    python -m benchmarks.moe_rows --out moe_rows.json

Less than a minute on one GPU. "torch" is what ``moe.row_kernels = "torch"`` runs: the readable functions, compiled by
inductor, and torch's own gather. The floor is the bytes that a pass has to read and write, each once, at the speed of
a copy measured in the same run; a gather reads a token once a choice, as its source is larger than the cache. The last
lines are a whole layer, compiled, forward and backward, in rounds that alternate.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.moe_block import forward_backward, our_block, relative
from benchmarks.timing import median_ms
from config.shapes import ModelShape, MoEShape
from model import row_ops
from model.permute import plan_pieces, plan_rows

Pass = tuple[int, Callable[[], Any]]
"""Bytes it has to move, and the pass."""


def passes(tokens: int, slots: int, dim: int, hidden: int, experts: int) -> dict[str, Pass]:
    """What one layer does, in bfloat16, with uniform random choices."""

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    choice = torch.rand(tokens, experts, device="cuda").topk(slots).indices
    plan, rows = plan_rows(choice, experts), tokens * slots
    weights = torch.rand(tokens, slots, device="cuda")
    pieces = torch.stack([torch.bincount(half.flatten(), minlength=experts) for half in choice.chunk(2)])
    (arrived,) = plan_pieces(pieces, (experts,), [rows])  # what two ranks send, a slot each
    flat = weights.view(-1, 1)
    x, many, h, active = random(tokens, dim), random(rows, dim), random(rows, 2 * hidden), random(rows, hidden)
    matrix = random(experts, dim, hidden)
    size, of_tokens, of_rows, narrow = matrix.nbytes, x.nbytes, many.nbytes, active.nbytes
    return {
        "gather, to experts": (2 * of_rows, lambda: row_ops.gather_rows(x, plan.token, plan.row)),
        "combine, weighted": (of_rows + of_tokens, lambda: row_ops.combine(many, weights, plan.row)),
        "sum of a token's gradients": (of_rows + of_tokens, lambda: row_ops.gather_sum(many, plan.token, plan.row)),
        "gather of what arrived, one slot": (2 * of_rows, lambda: row_ops.gather_rows(many, *arrived[:3:2])),
        "combine, one slot": (2 * of_rows, lambda: row_ops.combine(many, flat, arrived.row)),
        "SwiGLU": (3 * narrow, lambda: row_ops.swiglu(h)),
        "SwiGLU, backward": (
            6 * narrow,
            lambda: row_ops.swiglu_backward(h, active, weights, plan.slot, plan.ends),
        ),
        "zeros of experts without rows": (0, lambda: row_ops.zero_empty_(matrix, plan.ends)),
        "plan by a sort": (0, lambda: plan_rows(choice, experts)),
        "plan of sorted pieces": (0, lambda: plan_pieces(pieces, (experts,), [rows])),
        "copy, for scale": (2 * size, lambda: matrix.clone()),
    }


def measured(kernels: str, found: dict[str, Pass], repeats: int) -> dict[str, float]:
    """Milliseconds of each pass under ``moe.row_kernels``."""
    row_ops.choose_row_kernels(kernels, "cuda")
    return {name: median_ms([work], repeats, torch.device("cuda")) for name, (_, work) in found.items()}


def of_layer(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of a compiled layer, forward and backward, a median of each round."""
    moe = MoEShape(num_experts=arguments.experts, top_k=arguments.top_k, hidden_dim=arguments.hidden)
    shape = ModelShape(
        vocab_size=1, dim=arguments.dim, n_layers=1, n_heads=1, n_kv_heads=1, hidden_dim=1,
        max_seq_len=arguments.tokens, moe=moe,
    )  # fmt: skip
    block = our_block(shape, compiled=True)
    x = torch.randn(1, arguments.tokens, arguments.dim, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn_like(x)
    times: dict[str, list[float]] = {"torch": [], "triton": []}
    outputs = []
    for kernels in times:
        row_ops.choose_row_kernels(kernels, "cuda")
        forward_backward(block, x, grad)
        with torch.no_grad():
            outputs.append(block(x)[0])
    print(f"outputs of the layer differ by {relative(*outputs):.1e}")
    for turn in range(4):
        for kernels in list(times)[:: 1 if turn % 2 == 0 else -1]:
            row_ops.choose_row_kernels(kernels, "cuda")
            times[kernels].append(median_ms([lambda: forward_backward(block, x, grad)], 8, torch.device("cuda")))
    return times


def main() -> None:
    """Measure, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "moe_rows.json")
    for name, value in (("tokens", 16_384), ("dim", 2048), ("experts", 64), ("hidden", 1024), ("top_k", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found = passes(arguments.tokens, arguments.top_k, arguments.dim, arguments.hidden, arguments.experts)
    times = {kernels: measured(kernels, found, arguments.repeats) for kernels in ("torch", "triton")}
    speed = found["copy, for scale"][0] / times["triton"]["copy, for scale"]  # bytes a millisecond
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy moves {speed / 1e9:.2f} TB/s")
    print(f"{'pass':34} {'floor ms':>9} {'torch ms':>9} {'triton ms':>10}")
    table = {}
    for name, (size, _) in found.items():
        row = {"floor": size / speed, "torch": times["torch"][name], "triton": times["triton"][name]}
        table[name] = row
        print(f"{name:34} {row['floor']:9.3f} {row['torch']:9.3f} {row['triton']:10.3f}", flush=True)
    del found
    layer = of_layer(arguments)
    for kernels, taken in layer.items():
        print(f"layer, compiled, forward and backward, {kernels}: {statistics.median(taken):.2f} ms")
    report = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": {k: v for k, v in vars(arguments).items() if isinstance(v, int)},
        "copy_tb_per_s": speed / 1e9,
        "passes_ms": table,
        "layer_ms": layer,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {arguments.out}")


if __name__ == "__main__":
    main()
