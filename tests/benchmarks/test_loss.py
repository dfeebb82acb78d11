"""benchmarks/loss.py: every loss has its rows; without a GPU it says so."""

import json
import sys

import pytest

from benchmarks import loss


def test_every_implementation_is_measured_and_compiled_where_that_changes_it():
    rows = loss.rows_of(loss.NAMES)
    assert {name for name, compiled in rows if not compiled} == set(loss.NAMES) and len(loss.NAMES) == 5
    assert {name for name, compiled in rows if compiled} == {"torch", "row_chunked", "vocab_chunked"}


def test_a_machine_without_a_gpu_is_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["loss"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert loss.main() == 2
    assert "this machine has none" in capsys.readouterr().err


@pytest.mark.gpu
def test_small_tables(monkeypatch, tmp_path):
    sizes = ["--vocabularies", "4000", "--tokens", "1000", "--dim", "256", "--rounds", "2", "--repeats", "2"]
    chunks = ["--rows_per_chunk", "300", "--columns_per_chunk", "900"]
    monkeypatch.setattr(sys, "argv", ["loss", "--out", str(tmp_path / "loss.json"), *sizes, *chunks])
    assert loss.main() == 0
    (table,) = json.loads((tmp_path / "loss.json").read_text())["tables"]
    assert table["failed"] == {} and len(table["rows"]) == 8
    for row in table["rows"].values():
        assert row["difference_to_the_first"] < 0.02 and row["loss"] == pytest.approx(8.8, abs=0.2)
