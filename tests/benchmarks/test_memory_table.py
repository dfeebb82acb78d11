"""The memory table: which rows are due, what a row's file holds, and the fit of the estimate to it."""

import json

import pytest

from benchmarks import memory_table
from benchmarks.memory_fit import FEWEST_UNSEEN, GIB, MOST_FITTED, error_percent, fit, foreseen, main
from benchmarks.memory_rows import HASTE, ROWS
from benchmarks.memory_table import STEPS, due, figures, identity_of, table
from config.estimate import NAMES
from config.load import load

MACHINE = {"gpu_name": "a card", "torch": "2"}
ALL = [row for rows in ROWS.values() for row in rows]


def write(folder, row, active=1.0, session="now", **more):
    raw = {
        "name": row.name,
        "what": row.what,
        "base": row.base,
        "session": session,
        "identity": identity_of(row, MACHINE),
    }
    raw |= {"peak_active_gib": active, "peak_reserved_gib": active + 1, "tokens_per_s": 10.0, "loss": 2.0, **more}
    (folder / f"{row.name}.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.name)
def test_every_row_is_a_configuration(row):
    load(["--job.config_file", row.config, *HASTE, *row.words])
    assert not row.base or row.base in {r.name for r in ALL}


def test_names_are_distinct_and_at_most_eight_rows_are_fitted():
    assert len({row.name for row in ALL}) == len(ALL)
    assert len(NAMES) <= len(ROWS["fit"]) <= MOST_FITTED
    assert len(ROWS["check"]) + len(ROWS["switches"]) >= FEWEST_UNSEEN


def test_a_row_is_due_once_and_its_base_again_in_another_session(tmp_path):
    base, full = ROWS["debug"]
    assert due([base, full], tmp_path, MACHINE, "now") == [base, full]
    write(tmp_path, base)
    assert due([base, full], tmp_path, MACHINE, "now") == [full]
    assert due([base, full], tmp_path, MACHINE, "later") == [base, full]
    write(tmp_path, full)
    assert due([base, full], tmp_path, MACHINE, "later") == []
    assert due([base, full], tmp_path, MACHINE | {"torch": "3"}, "now") == [base, full]


def test_out_of_memory_is_a_result_and_a_failure_is_not(tmp_path):
    base, full = ROWS["debug"]
    write(tmp_path, base, error="out of memory")
    write(tmp_path, full, error="exit code 1")
    assert due([base, full], tmp_path, MACHINE, "now") == [full]
    assert "| the debug model | out of memory |" in table([base], tmp_path)


def test_speeds_are_compared_within_a_session_only(tmp_path):
    base, full = ROWS["debug"]
    write(tmp_path, base, active=4.0)
    write(tmp_path, full, active=3.0)
    assert "| 3.0 (-1.0) | 4.0 | 10 (1.000 x) | 2.000 |" in table([base, full], tmp_path)
    write(tmp_path, full, session="later")
    assert "x)" not in table([base, full], tmp_path)


def test_a_row_that_shared_its_gpu_has_no_speed(tmp_path, monkeypatch, capsys):
    def measure(row, *_):
        write(tmp_path, row)
        return json.loads((tmp_path / f"{row.name}.json").read_text()) | {"seconds": 1.0}

    monkeypatch.setattr(memory_table, "measure", measure)
    monkeypatch.setattr("benchmarks.compare.machine", lambda: MACHINE | {"hostname_hash": "h"})
    assert memory_table.main(["debug", "--out", str(tmp_path), "--commit", "c", "--memory_only"]) == 0
    assert [json.loads(path.read_text())["tokens_per_s"] for path in tmp_path.iterdir()] == [None, None]
    assert capsys.readouterr().out.count(" | - | 2.000 |") == 2


def test_figures_leave_warm_up_out_of_the_speed_and_nothing_out_of_the_peak():
    def line(step, times, active):
        tags = {"memory/max_active(GiB)": active, "memory/max_reserved(GiB)": active}
        warm_up = [s for s in (1, 2, 3) if s <= step]
        times_of = {"step_times_s": times, "excluded_steps": warm_up}
        return {"step": step, "tokens": 100 * step, "loss_metrics/global_avg_loss": 1.0 / step} | tags | times_of

    found = figures([line(1, [9.0], 5.0), line(3, [8.0, 7.0], 4.0), line(STEPS, [2.0, 1.0, 2.0], 4.0)])
    assert (found["peak_active_gib"], found["tokens_per_s"], found["loss"]) == (5.0, 50.0, 1.0 / STEPS)


TRUE = {"eager": 1.2, "compiled": 0.8, "experts": 1.1, "casts": 0.3, "working": 1.5, "loss": 1.3}


def test_the_fit_finds_what_made_the_measurements():
    rows = [(row, foreseen(row, TRUE).peak / GIB) for row in ROWS["fit"]]
    found = fit(rows)
    unseen = [row for row in ROWS["check"] + ROWS["switches"] if row not in ROWS["fit"]]
    off = {row.name: abs(error_percent(row, foreseen(row, TRUE).peak / GIB, found)) for row in unseen}
    counted = {
        row.name: abs(error_percent(row, foreseen(row, TRUE).peak / GIB, dict.fromkeys(NAMES, 1.0))) for row in unseen
    }
    assert max(off.values()) < 5 < max(counted.values()), off


def test_the_fit_is_written_with_what_it_comes_from(tmp_path, capsys):
    assert main(["--rows", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 1
    assert "0 fit rows" in capsys.readouterr().err
    for row in ROWS["fit"] + ROWS["check"] + ROWS["switches"][:6]:
        write(tmp_path, row, active=foreseen(row, TRUE).peak / GIB)
    assert main(["--rows", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["gpu"], len(written["fitted_on"]), len(written["unseen"])) == ("a card", 8, 8)
