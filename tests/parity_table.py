"""docs/parity.md: the largest error of every parity row, written at the end of ``make test-slow``.

Rows come from ``tests.parity.check`` by the name of the test that called it. The file is written when PARITY_TABLE
names it, which the Makefile does for the tier that runs every row; a test that fails leaves its row out and the file
says how many did.
"""

import os
from pathlib import Path

import torch

_rows: dict[str, tuple[int, dict[str, float]]] = {}


def record(world_size: int, errors: dict[str, float]) -> None:
    """Remember the errors of a check that passed, under the running test; a test of several keeps the largest."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]
    ranks, seen = _rows.get(name, (0, {}))
    _rows[name] = (max(ranks, world_size), {kind: max(e, seen.get(kind, 0.0)) for kind, e in errors.items()})


def write(failed: int) -> None:
    """Write the table, if PARITY_TABLE says where."""
    path = os.environ.get("PARITY_TABLE")
    if not path or not _rows:
        return
    kinds = ("loss", "gradient", "gradient norm", "weights")
    lines = [
        "# Parity",
        "",
        "Largest relative error of each layout against one process: float32 on the CPU (gloo), plain unclipped SGD,",
        "two steps; token ids and initial weights are compared exactly. Gradients and weights: per tensor, in L2.",
        f"Written by `make test-slow`, torch {torch.__version__}: {len(_rows)} rows, {failed} tests failed.",
        "",
        "| row | ranks | " + " | ".join(kinds) + " |",
        "|---|---|" + "---|" * len(kinds),
    ]
    for name, (ranks, errors) in sorted(_rows.items()):
        file, _, test = name.partition("::")
        cells = " | ".join(f"{errors[kind]:.1e}" if kind in errors else "" for kind in kinds)
        lines.append(f"| {Path(file).stem.removeprefix('test_')}: {test.removeprefix('test_')} | {ranks} | {cells} |")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
