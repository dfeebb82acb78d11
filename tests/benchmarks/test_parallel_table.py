import json
from pathlib import Path

import pytest

from benchmarks import parallel_table as bench
from benchmarks.two_ranks import folder_name, read
from config.load import load_file
from config.world import check_world
from tests.benchmarks.test_two_ranks import write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("base, sequences", [("llama3_1b", 16), ("debug_cpu", 8)])
def test_every_row_is_a_legal_run_of_two_ranks_with_the_same_tokens(base, sequences):
    runs = bench.plan(30, sequences, 4)
    assert len(runs) == 3 + len(bench.TECHNIQUES) == 10
    for name, changes in runs.items():
        config = load_file(ROOT / "train_configs" / f"{base}.toml", changes).config
        degrees = check_world(config, 2)
        assert config.training.global_batch_size == sequences and config.training.steps == 30
        split = {"TP 2": "tp", "PP 2, 1F1B": "pp", "PP 2, ZBV": "pp", "DDP": "dp_replicate", "ZeRO 1": "dp_replicate"}
        assert degrees[split.get(name, "dp_shard")] == 2, name


def test_fsdp_runs_differ_in_the_split_alone():
    runs = [keys for name, keys in bench.plan(30, 16, 4).items() if name.startswith("FSDP")]
    assert [keys.pop("training.local_batch_size") for keys in runs] == [4, 2, 1]
    assert runs[0] == runs[1] == runs[2]


def test_the_spread_is_the_largest_of_any_step():
    mean, widest = bench.spread([{1: 3.0, 2: 2.0}, {1: 3.01, 2: 2.04}, {1: 2.99, 2: 2.0, 3: 1.0}])
    assert widest == pytest.approx(0.04) and mean.keys() == {1, 2} and mean[1] == pytest.approx(3.0)


def results(tmp_path: Path, **away: float) -> dict:
    splits = {"FSDP, micro-batch 4": 0.0, "FSDP, micro-batch 2": 0.01, "FSDP, micro-batch 1": -0.01}
    for name, offset in (splits | away).items():
        losses = [3.0 - 0.01 * i for i in range(20)]
        losses[7] += offset
        write_run(tmp_path / folder_name(name), losses)
    return {name: read(tmp_path / folder_name(name)) for name in splits | away}


def test_a_loss_is_judged_at_every_step_against_three_times_the_spread(tmp_path):
    found = bench.table(results(tmp_path, near=0.059, far=-0.061), 20)
    assert found["spread_nats"] == pytest.approx(0.02)
    assert found["rows"]["near"]["within"] is True and found["rows"]["far"]["within"] is False
    assert found["rows"]["near"]["tokens_per_second_per_rank"] == pytest.approx(1000 / 2 / 0.5)
    page = bench.render(found, {"torch": "2.11", "gpu_name": None})
    assert "| near | 1,000 | - | 40.2 | - | - | - | 5.9e-02 | yes |" in page and "**no**" in page
    assert "torch 2.11." in page and "None" not in page


def test_a_run_cut_short_is_not_within(tmp_path):
    found = bench.table(results(tmp_path, near=0.0), 30)
    assert found["rows"]["near"]["within"] is False


def test_without_three_fsdp_runs_nothing_is_judged(tmp_path):
    some = results(tmp_path, near=0.0)
    some["FSDP, micro-batch 2"] = {"error": "out of memory"}
    found = bench.table(some, 20)
    assert found["rows"]["near"]["within"] is None and found["spread_nats"] is None
    assert "| FSDP, micro-batch 2 | out of memory |" in bench.render(found, {})


@pytest.mark.parametrize(
    "words, rule",
    [
        (["--steps", "16"], "--steps must be above 16"),
        (["--micro_batch", "2"], "a multiple of 4"),
        (["--sequences", "12"], "one of 2 x it"),
        (["--only", "PP 2"], "'PP 2' is none of DDP;"),
    ],
)
def test_a_table_that_could_not_be_made_is_refused(words, rule, capsys):
    with pytest.raises(SystemExit):
        bench.main(words)
    assert rule in capsys.readouterr().err


@pytest.mark.slow
def test_the_debug_model_on_gloo_from_the_command_to_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    base = str(ROOT / "train_configs" / "debug_cpu.toml")
    words = ["--base", base, "--folder", str(tmp_path), "--sequences", "8", "--steps", "18"]
    assert bench.main(words) in (0, 1)
    (path,) = tmp_path.glob("*/parallel_table.json")
    found = json.loads(path.read_text())
    assert found["spread_nats"] > 0 and len(found["rows"]) == 10
    for name, row in found["rows"].items():
        assert "error" not in row, (name, row)
        assert row["tokens_per_second_per_rank"] > 0 and row["exposed_communication_percent"] >= 0
        assert row["largest_difference"] < 5e-3, name  # bfloat16: autocast and FSDP2 round in other places
        assert (row["bubble_percent"] is not None) == name.startswith("PP")
    before = path.stat().st_mtime_ns
    logs = {log: log.stat().st_mtime_ns for log in tmp_path.rglob("metrics.jsonl")}
    bench.main(words)
    assert path.stat().st_mtime_ns > before, "the table is made anew"
    assert len(logs) == 10 and logs == {log: log.stat().st_mtime_ns for log in tmp_path.rglob("metrics.jsonl")}
