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
    if row.base and "error" not in more:
        raw |= {"beside": {"peak_active_gib": 4.0, "tokens_per_s": 20.0, "session": session}} | more
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


def test_a_base_is_measured_though_it_was_not_asked_for(tmp_path):
    base, full = ROWS["debug"]
    assert due([full], tmp_path, MACHINE, "now") == [base, full]
    write(tmp_path, base)
    assert due([full], tmp_path, MACHINE, "now") == [full]
    write(tmp_path, full)
    assert due([full], tmp_path, MACHINE, "now") == []
    assert due([full], tmp_path, MACHINE, "now", again=True) == [full]
    assert due([base, full], tmp_path, MACHINE, "now", again=True) == [base, full]


def test_out_of_memory_is_a_result_and_a_failure_is_not(tmp_path):
    base, full = ROWS["debug"]
    write(tmp_path, base, error="out of memory")
    write(tmp_path, full, error="exit code 1")
    assert due([base, full], tmp_path, MACHINE, "now") == [full]
    assert "| the debug model | out of memory |" in table([base], tmp_path)


def test_a_row_without_its_other_side_is_due(tmp_path):
    base, full = ROWS["debug"]
    write(tmp_path, base)
    write(tmp_path, full)
    path = tmp_path / "debug_full.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "beside"}))
    assert due([base, full], tmp_path, MACHINE, "now") == [full]


def test_a_row_is_compared_with_what_its_base_was_then(tmp_path):
    base, full = ROWS["debug"]
    write(tmp_path, full, active=3.0)
    write(tmp_path, base, active=9.0, session="later", tokens_per_s=5.0)
    assert "| 3.0 (-1.0) | 4.0 | 10 (0.500 x) | 2.000 |" in table([base, full], tmp_path)


def test_a_row_of_other_words_is_not_shown(tmp_path):
    base, full = ROWS["debug"]
    write(tmp_path, full)
    path = tmp_path / "debug_full.json"
    path.write_text(path.read_text().replace('"full"]', '"none"]').replace('"full",', '"none",'))
    assert len(table([base, full], tmp_path).splitlines()) == 2


@pytest.fixture
def session(tmp_path, monkeypatch):
    """Runs the table on a machine on which a row of ``outcome`` is what it says, and any other takes a second."""
    outcome, ran = {}, []

    def measure(row, machine, session, commit, limit_s):
        ran.append(row.name)
        write(tmp_path / "elsewhere", row, session=session)
        raw = json.loads((tmp_path / "elsewhere" / f"{row.name}.json").read_text())
        raw.pop("beside", None)
        return raw | {"seconds": 1.0} | outcome.get(row.name, {})

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(memory_table, "measure", measure)
    monkeypatch.setattr("benchmarks.compare.machine", lambda: MACHINE | {"hostname_hash": "h"})

    def run(*words):
        ran.clear()
        return memory_table.main([*words, "--out", str(tmp_path / "rows"), "--commit", "c"]), list(ran)

    run.outcome, run.folder = outcome, tmp_path / "rows"
    return run


def test_a_row_keeps_what_its_base_measured_beside_it(session):
    assert session("debug") == (0, ["debug_base", "debug_full"])
    beside = json.loads((session.folder / "debug_full.json").read_text())["beside"]
    assert (beside["peak_active_gib"], beside["tokens_per_s"], beside["loss"]) == (1.0, 10.0, 2.0)
    assert session("debug") == (0, [])
    assert session("debug", "--again") == (0, ["debug_base", "debug_full"])


def test_a_failed_base_leaves_its_rows_for_later_and_a_failed_row_no_other(session, capsys):
    session.outcome["debug_base"] = {"error": "exit code 1"}
    assert session("debug") == (1, ["debug_base"])
    assert "debug_full: not run, as debug_base failed" in capsys.readouterr().out
    assert not (session.folder / "debug_full.json").exists()
    session.outcome |= {"debug_base": {}, "debug_full": {"error": "exit code 1"}}
    assert session("debug") == (1, ["debug_base", "debug_full"])
    session.outcome.clear()
    assert session("debug") == (0, ["debug_full"])


def test_a_row_beside_a_base_without_memory_enough_is_measured(session):
    session.outcome["debug_base"] = {"error": "out of memory"}
    assert session("debug") == (0, ["debug_base", "debug_full"])
    assert json.loads((session.folder / "debug_full.json").read_text())["beside"]["error"] == "out of memory"


def test_a_failure_does_not_take_the_place_of_a_measurement(session):
    session("debug")
    session.outcome["debug_full"] = {"error": "exit code 1"}
    assert session("debug", "--again")[0] == 1
    assert "error" not in json.loads((session.folder / "debug_full.json").read_text())


def test_a_budget_ends_before_a_run_that_would_not_fit_and_a_run_it_ended_is_none(session):
    session.outcome["debug_base"] = {"seconds": 1000.0}
    assert session("debug", "--budget_s", "500") == (3, ["debug_base"])
    session.outcome["debug_full"] = {"seconds": 500.0, "error": "stopped after 500 s"}
    assert session("debug", "--budget_s", "500") == (3, ["debug_full"])
    assert not (session.folder / "debug_full.json").exists()
    session.outcome["debug_full"] = {"seconds": 180.0, "error": "stopped after 180 s"}
    assert session("debug", "--budget_s", "500") == (1, ["debug_full"])
    assert json.loads((session.folder / "debug_full.json").read_text())["error"] == "stopped after 180 s"


def test_a_row_that_shared_its_gpu_has_no_speed(session, capsys):
    assert session("check", "--memory_only")[0] == 0
    assert [json.loads(path.read_text())["tokens_per_s"] for path in session.folder.iterdir()] == [None, None]
    assert capsys.readouterr().out.count(" | - | 2.000 |") == 2
    with pytest.raises(SystemExit):
        session("debug", "--memory_only")
    assert "rows that have a base are there for their speed too" in capsys.readouterr().err


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
    path = tmp_path / f"{ROWS['check'][0].name}.json"
    path.write_text(path.read_text().replace("a card", "another"))
    assert main(["--rows", str(tmp_path), "--out", str(tmp_path / "out.json")]) == 1
    assert "rows of a card with torch 2, another with torch 2" in capsys.readouterr().err
