import json
from pathlib import Path

import pytest

import titan
from benchmarks.rows import RESULTS, SPEED, save_raw
from benchmarks.speed_table import build_table, main
from tests.benchmarks.sides import raw_file, run_of


def test_the_committed_table_is_what_the_raw_files_give() -> None:
    committed = json.loads((RESULTS / "speed.json").read_text(encoding="utf-8"))
    assert committed == build_table(SPEED), "run python -m benchmarks.speed_table"
    for row in committed:
        assert (RESULTS / row["raw"]).is_file()
        peak = titan.peak_flops(row["gpu"])
        assert peak is not None
        for side in ("ours", "peer"):
            assert row[f"{side}_tflops"] is None or 0 < row[f"{side}_tflops"] * 1e12 <= peak


def test_a_figure_above_the_peak_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of("ours", [0.009] * 25), run_of("torchtitan", [0.02] * 25)]
    save_raw(tmp_path / "speed" / "x.json", raw_file(runs))
    assert main(["--folder", str(tmp_path / "speed"), "--out", str(tmp_path / "speed.json")]) == 1
    assert "1,000 TFLOP/s of ours is above the 989 of a NVIDIA H200" in capsys.readouterr().err
    assert not (tmp_path / "speed.json").exists()


def test_a_table_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of("ours", [0.01] * 25), run_of("torchtitan", [0.02] * 25)]
    save_raw(tmp_path / "speed" / "x.json", raw_file(runs))
    assert main(["--folder", str(tmp_path / "speed"), "--out", str(tmp_path / "speed.json")]) == 0
    rows = json.loads((tmp_path / "speed.json").read_text())
    assert [(row["ratio"], row["raw"]) for row in rows] == [(pytest.approx(2.0), "speed/x.json")]
    assert "2.000 x" in capsys.readouterr().out
