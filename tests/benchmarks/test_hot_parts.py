"""The table of hot parts: every part runs at small shapes, is held to its floor, and a stopped table goes on."""

import json

import pytest
import torch

from benchmarks import hot_parts
from benchmarks.part import BOTH, FORWARD, Work, setting_of
from benchmarks.parts import PARTS, rows_of
from benchmarks.timing import ceilings, median_ms, time_ms

CPU = torch.device("cpu")
NEEDS_A_GPU = ("liger", "triton", "quack")


def table(tmp_path, *options: str, code: int = 0) -> dict:
    words = ["--cpu", "--compile_backend", "eager", "--repeats", "1", "--out", str(tmp_path / "table"), *options]
    assert hot_parts.main(words) == code
    return json.loads((tmp_path / "table.json").read_text())


OF_EXPERTS = ("router", "plan", "gather", "combine", "expert SwiGLU", "expert product", "experts")


@pytest.mark.parametrize("workload", ["debug", "debug_moe"])
def test_every_part_runs(tmp_path, monkeypatch, workload):
    monkeypatch.setattr(hot_parts, "MOST_SETS", 1)
    expected = set(OF_EXPERTS) if workload == "debug_moe" else set(PARTS) - set(OF_EXPERTS)
    report = table(tmp_path, "--workloads", workload, "--only", ";".join(expected))
    rows = report["rows"].values()
    failed = {row["variant"].split(",")[0] for row in rows if "error" in row}
    assert {name.split("_")[0] for name in failed} <= set(NEEDS_A_GPU), [r["error"] for r in rows if "error" in r]
    for row in rows:
        floors = 1e3 * row["bytes"] / row["limits"]["bytes_per_s"], 1e3 * row["flops"] / row["limits"]["flops_per_s"]
        assert row["floor_ms"] == max(floors) > 0 and row["floor"] == ("bytes" if floors[0] >= floors[1] else "FLOPs")
        assert "error" in row or row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"])
    assert {row["part"] for row in rows} == expected
    page = (tmp_path / "table.md").read_text()
    assert page.count("\n| ") == len(rows) + 1 and f"## {workload}" in page


def test_a_table_goes_on_and_failed_rows_are_tried_when_named(tmp_path, monkeypatch, capsys):
    measured: list[str] = []

    def measure(row, limits, *_):
        measured.append(row.name)
        found = {"workload": row.workload, "part": row.part, "variant": row.variant, "passes": row.passes}
        found |= {"floor_ms": 1.0, "floor": "bytes"}
        return found | ({"error": "no driver"} if row.variant == "liger" else {"ms": len(measured), "ratio": 2.0})

    monkeypatch.setattr(hot_parts, "measure", measure)
    only = ("--workloads", "debug", "--only", "RMSNorm")
    first = table(tmp_path, *only)["rows"]
    assert len(first) == len(measured) == 6
    again = table(tmp_path, *only)["rows"]
    assert measured[6:] == [name for name, row in first.items() if "error" in row] and len(measured) == 8
    assert again == first

    measured.clear()
    assert table(tmp_path, "--workloads", "debug", "--budget_s", "-1", code=1)["rows"].keys() == first.keys()
    assert measured == [] and "out of time before debug: RoPE" in capsys.readouterr().out

    old = json.loads((tmp_path / "table.json").read_text())
    old["environment"]["torch"] = "1.0"
    (tmp_path / "table.json").write_text(json.dumps(old))
    table(tmp_path, *only)
    assert sorted(measured) == sorted(first) and "from another GPU or torch" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        hot_parts.main(["--cpu", "--only", "nothing"])


def test_a_machine_without_a_gpu_is_told(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert hot_parts.main([]) == 2
    assert "--cpu shows that it works" in capsys.readouterr().err


def test_floors_of_the_7b_are_those_of_its_arithmetic():
    """By hand: 8 sequences of 4096, dim 2048, 64 experts of 1024, top-8."""
    setting = setting_of("moe_7b", CPU, "eager")
    tokens = 8 * 4096
    assert (setting.tokens, setting.shape.dim) == (tokens, 2048)
    work = {(row.part, row.variant, row.passes): row.work for row in rows_of(setting)}
    experts = work["experts", "grouped_mm", BOTH]
    assert experts.flops == 3 * 2 * (tokens * 8) * 3 * 2048 * 1024
    products = [w for (part, *_), w in work.items() if part == "expert product"]
    assert sum(w.flops for w in products) == experts.flops
    rows, narrow = tokens * 8 * 2048 * 2, tokens * 2048 * 2
    assert work["gather", "triton", FORWARD] == Work(work["gather", "triton", FORWARD].call, rows + narrow, 0)
    assert work["RMSNorm", "compiled", BOTH].bytes == 5 * narrow
    adamw = work["AdamW", "fused", "step"].bytes / 28
    assert adamw == pytest.approx(6_844_127_232 / 2, rel=1e-3)


def test_inputs_are_taken_in_turn_and_warmed_up():
    taken: list[str] = []
    calls = [lambda name=name: taken.append(name) for name in "ab"]
    assert len(time_ms(calls, 5, device=CPU)) == 5 and "".join(taken) == "ababa"
    taken.clear()
    assert median_ms(calls, 4, CPU, warm_up=2) >= 0
    assert "".join(taken) == "abab" + "ab" + "abab"
    found = ceilings(CPU, copy_bytes=2**20, product_size=64, repeats=3)
    assert found["bytes_per_s"] > 1e7 and found["flops_per_s"] > 1e6


@pytest.mark.gpu
def test_every_part_runs_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(hot_parts, "ceilings", lambda device: ceilings(device, copy_bytes=2**26, product_size=1024))
    words = ["--workloads", "debug", "debug_moe", "--repeats", "3", "--out", str(tmp_path / "table")]
    assert hot_parts.main(words) == 0
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    failed = {name: row["error"] for name, row in rows.items() if "error" in row}
    allowed = ("quack", "attention")  # kernels that want Hopper, a package, or another head size
    assert not {name for name in failed if not any(word in name for word in allowed)}, failed
