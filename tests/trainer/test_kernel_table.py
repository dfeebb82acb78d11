"""The table of kernels: sums, order, shares, and that a long one is cut in the text alone."""

import json

import pytest

from tests.trainer.events import kernel, part
from trainer.kernel_table import SHOWN, tabulate
from trainer.trace import read_window


def table(*kernels, steps=1):
    return tabulate(read_window([part("window", 0, 1000), part("optimizer", 0, 10), *sum(kernels, [])]), steps)


def test_calls_add_up_by_name_and_kind():
    found = table(
        kernel("nvjet", 100, 200, launched=20),
        kernel("nvjet", 200, 350, launched=21),
        kernel("elementwise", 350, 400, launched=5),
        kernel("elementwise", 400, 500, launched=22),
        kernel("ncclDevKernel_AllReduce", 100, 200, launched=23, stream=20),
    )
    assert [(r.name, r.kind, r.calls, r.total_us) for r in found.rows] == [
        ("nvjet", "GEMM", 2, 250),
        ("elementwise", "elementwise", 1, 100),
        ("ncclDevKernel_AllReduce", "communication", 1, 100),
        ("elementwise", "optimizer", 1, 50),
    ]
    record = json.loads(json.dumps(found.record()))
    assert record["total_us"] == 500
    assert record["kernels"][0] == {"name": "nvjet", "kind": "GEMM", "calls": 2, "total_us": 250, "share": 0.5}
    assert sum(row["share"] for row in record["kinds"]) == pytest.approx(1)
    assert sum(row["share"] for row in record["kernels"]) == pytest.approx(1)


def test_text_gives_a_step_and_cuts_long_tables_and_names():
    found = table(*(kernel(f"k{i}" + "x" * 200, i, i + 1, launched=20) for i in range(SHOWN + 5)), steps=5)
    text = found.render()
    assert "and 5 more" in text and max(map(len, text.splitlines())) < 190
    assert "0.009 ms a step" not in text and "0.01 ms a step, 5 profiled steps" in text
    assert len(found.record()["kernels"]) == SHOWN + 5


def test_an_empty_window_has_an_empty_table():
    found = tabulate(read_window([part("window", 0, 10)]), 1)
    assert found.rows == [] and found.record()["total_us"] == 0 and "0.00 ms a step" in found.render()
