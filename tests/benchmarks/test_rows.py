from pathlib import Path

import pytest

from benchmarks.rows import file_name, good_runs, lacks, load_raw, rates, row_of, save_raw, sentence
from tests.benchmarks.sides import raw_file, run_of


def test_file_names_hold_workload_peer_number_and_card() -> None:
    assert file_name("moe_7b", "torchtitan", 2, "NVIDIA H200") == "moe_7b-torchtitan-2gpu-h200.json"
    assert file_name("a", "b", 1, "NVIDIA A100-SXM4-80GB") == "a-b-1gpu-a100-sxm4-80gb.json"
    assert file_name("debug", "transformers", 1, None) == "debug-transformers-1gpu-cpu.json"


def test_rates_are_those_of_whole_windows_after_warm_up() -> None:
    times = [9.0] * 5 + [1.0, 1.0, 1.0, 1.0, 6.0] + [2.0] * 5 + [7.0] * 3
    assert rates(run_of("ours", times), 1000) == [500.0, 500.0]


def test_torchtitans_own_windows_are_taken_as_they_are() -> None:
    assert rates(run_of("torchtitan", None, window_tokens_per_s=[10.0, 20.0]), 1000) == [10.0, 20.0]  # type: ignore[arg-type]


def test_a_row_is_the_ratio_of_medians_over_all_runs() -> None:
    raw = raw_file(
        [
            run_of("torchtitan", [1.0] * 25),
            run_of("ours", [0.5] * 25, reserved_gib=3.0),
            run_of("ours", [0.4] * 25, reserved_gib=5.0, losses={"20": 9.0, "25": 2.5}),
            run_of("torchtitan", [1.0] * 25),
        ]
    )
    row = row_of(raw, "speed/x.json")
    assert row["ours_tokens_per_s"] == pytest.approx((2000 + 2500) / 2)
    assert (row["ratio"], row["peer_tokens_per_s"]) == (pytest.approx(2.25), 1000)
    assert row["ours_tflops"] == pytest.approx(2250 * 9e9 / 1e12)
    assert (row["ours_reserved_gib"], row["peer_reserved_gib"]) == (5.0, 2.0)
    assert (row["ours_loss"], row["peer_loss"], row["steps"], row["error"]) == (2.5, 3.0, 20, None)
    assert row["runs"] == {"ours": 2, "peer": 2} and row["raw"] == "speed/x.json"
    asked = "workload peer ratio ours_tokens_per_s peer_tokens_per_s ours_tflops peer_tflops ours_reserved_gib"
    asked += " peer_reserved_gib gpu torch commit raw ngpu settings"
    assert set(asked.split()) <= row.keys()


def test_a_side_that_failed_leaves_nulls_and_says_why() -> None:
    row = row_of(raw_file([run_of("ours", [1.0] * 25), {"side": "torchtitan", "error": "out of memory"}]), "x")
    assert (row["ratio"], row["peer_tokens_per_s"], row["ours_tokens_per_s"]) == (None, None, 1000)
    assert row["error"] == "torchtitan: out of memory" and row["settings"] == {"ours": "4", "peer": None}
    assert "no ratio" in sentence(row) and "[torchtitan: out of memory]" in sentence(row)


def test_a_side_lacks_runs_until_it_has_them_or_failed() -> None:
    raw = raw_file([run_of("ours", [1.0] * 25), {"side": "torchtitan", "error": "exit code 1"}])
    assert lacks(raw, "ours", 2) and not lacks(raw, "ours", 1) and not lacks(raw, "torchtitan", 2)
    assert good_runs(raw, "torchtitan") == []


def test_measurements_count_for_their_identity_alone(tmp_path: Path) -> None:
    raw, path = raw_file([]), tmp_path / "deep" / "x.json"
    save_raw(path, raw)
    assert load_raw(path, raw["identity"]) == raw
    assert load_raw(path, raw["identity"] | {"commit": "def"}) is None
    assert [p.name for p in path.parent.iterdir()] == ["x.json"], "no partial file is left"
    path.write_text("{ cut off")
    assert load_raw(path, raw["identity"]) is None
