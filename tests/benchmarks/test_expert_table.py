"""Rows of the table of experts on two ranks: legal, held against FSDP, and run to the end on a CPU."""

from pathlib import Path

import pytest

from benchmarks import expert_table as bench
from benchmarks.two_ranks import folder_name, read
from config.load import load_file
from config.world import check_world
from tests.benchmarks.test_two_ranks import write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("base, sequences, micro_batch", [("moe_7b_a1b", 16, 4), ("debug_moe_cpu", 8, 2)])
def test_every_row_is_a_legal_run_of_two_ranks(base, sequences, micro_batch):
    for name, changes in bench.plan(20, sequences, micro_batch).items():
        config = load_file(ROOT / "train_configs" / f"{base}.toml", changes).config
        degrees = check_world(config, 2)
        assert (degrees["tp"], degrees["ep"]) == (2 if "TP" in name else 1, 2 if "EP" in name else 1)


def test_layouts_are_held_against_the_first(tmp_path):
    losses = [3.0 - 0.01 * i for i in range(20)]
    for name, offset in {"FSDP": 0.0, "EP 2, once an expert": 0.05, "TP 2": 0.001}.items():
        write_run(tmp_path / folder_name(name), [*losses[:7], losses[7] + offset, *losses[8:]])
    write_run(tmp_path / folder_name("TP 2 x EP 2"), losses[:9])
    rows = bench.table({name: read(tmp_path / folder_name(name)) for name in bench.LAYOUTS}, 20, within=0.03)
    assert [row.get("agrees") for row in rows.values()] == [True, False, None, None, True, False]
    page = bench.render(rows, 20, 0.03, {"torch": "2.11"})
    assert "| EP 2, once a rank | not run |" in page and "| **no** |" in page


@pytest.mark.slow
def test_the_whole_table_runs_on_a_cpu_and_is_not_run_twice(tmp_path, capsys):
    arguments = [
        "--base", str(ROOT / "train_configs" / "debug_moe_cpu.toml"), "--sequences", "8", "--micro_batch", "2",
        "--steps", "18", "--folder", str(tmp_path), "--only", "FSDP;EP 2, once a rank",
    ]  # fmt: skip
    assert bench.main(arguments) == 0, capsys.readouterr().out
    assert "| EP 2, once a rank |" in capsys.readouterr().out
    assert bench.main(arguments) == 0
    assert "..." not in capsys.readouterr().out, "finished runs are kept"
