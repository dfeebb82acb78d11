"""Rows of the table by sequence length: legal, held against each other, and run to the end on a CPU."""

from pathlib import Path

import pytest

from benchmarks import context_table as bench
from benchmarks.two_ranks import folder_name, read
from config.load import load_file
from config.world import check_world
from tests.benchmarks.test_two_ranks import write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("base, lengths", [("llama3_1b_cp2", bench.LENGTHS), ("debug_cp", (128, 256))])
def test_every_row_is_a_legal_run_of_two_ranks(base, lengths):
    runs = bench.plan(list(lengths), 20)
    alone = {int(name.split()[0]) for name in runs if name.endswith("FSDP")}
    assert alone == {length for length in lengths if length <= bench.TWO_SEQUENCES}
    assert len(runs) == len(lengths) * (len(bench.METHODS) - 1) + len(alone)
    for name, changes in runs.items():
        config = load_file(ROOT / "train_configs" / f"{base}.toml", changes).config
        degrees = check_world(config, 2)
        assert (degrees["cp"], degrees["dp_shard"]) == ((1, 2) if "FSDP" in name else (2, 1))
        assert str(config.training.seq_len) == name.split()[0]


def test_methods_of_a_length_are_held_against_each_other(tmp_path):
    losses = [3.0 - 0.01 * i for i in range(20)]
    for name, offset in {"128 ring": 0.0, "128 ulysses": 0.03, "256 ring": 0.5, "256 ulysses": 0.501}.items():
        write_run(tmp_path / folder_name(name), [*losses[:7], losses[7] + offset, *losses[8:]])
    write_run(tmp_path / folder_name("256 allgather"), losses[:9])
    names = ["128 FSDP", "128 ring", "128 ulysses", "256 ring", "256 ulysses", "256 allgather"]
    rows = bench.table({name: read(tmp_path / folder_name(name)) for name in names}, 20, within=0.02)
    assert rows["128 FSDP"]["error"] == "not run"
    assert [rows[name]["agrees"] for name in names[1:]] == [True, False, True, True, False]
    page = bench.render(rows, 20, 0.02, {"torch": "2.11"})
    assert "| 128 | FSDP | not run |" in page and "| 256 | ulysses | 1,000 | 40.2 |" in page


@pytest.mark.slow
def test_the_whole_table_runs_on_a_cpu_and_is_not_run_twice(tmp_path, capsys):
    arguments = [
        "--base", str(ROOT / "train_configs" / "debug_cp.toml"), "--lengths", "128", "--steps", "14",
        "--folder", str(tmp_path), "--only", "FSDP;ring;ulysses",
    ]  # fmt: skip
    assert bench.main(arguments) == 0, capsys.readouterr().out
    assert "| 128 | ring |" in capsys.readouterr().out
    assert bench.main(arguments) == 0
    assert "..." not in capsys.readouterr().out, "finished runs are kept"
