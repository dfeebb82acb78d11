import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rows import load_raw, save_raw
from benchmarks.session import OutOfTime, Row, Session
from benchmarks.side import Job, Setting, TooSlow
from tests.benchmarks.sides import Answer, Told, debug_job, out_of_memory


def steady(seconds: float = 1.0) -> Answer:
    return lambda setting, job: seconds


def session(
    tmp_path: Path, calls: list[str], answers: dict[str, Answer], settings: dict[str, str] | None = None, **more: Any
) -> Session:
    """A session of the peers in ``answers``; rows go on from what their files hold."""
    rows = []
    for peer in answers:
        if peer != "ours":
            path = tmp_path / f"{peer}.json"
            raw = load_raw(path, {"peer": peer}) or {"identity": {"peer": peer}, "tries": [], "runs": []}
            rows.append(Row(peer, path, raw))
    lists = {name: (settings or {}).get(name, "4") for name in answers}

    def parsed(item: str) -> Setting:
        batch, *words = item.split("+")
        return Setting(int(batch), tuple(words))

    return Session(
        job=debug_job(tmp_path),
        sides={name: Told(name, answer, calls) for name, answer in answers.items()},
        rows=rows,
        candidates={name: [parsed(item) for item in text.split(",")] for name, text in lists.items()},
        say=lambda line: None,
        **more,
    )


def sides_of(row: Row) -> list[str]:
    return [run["side"][0] for run in row.raw["runs"]]


def test_one_peer_runs_in_baab_order_and_two_share_our_runs(tmp_path: Path) -> None:
    calls: list[str] = []
    session(tmp_path, calls, {"ours": steady(), "b": steady()}).measure()
    assert calls == ["b 4", "ours 4", "ours 4", "b 4"]
    calls.clear()
    two = session(tmp_path, calls, {"ours": steady(), "c": steady(), "d": steady()})
    two.measure()
    assert calls == ["c 4", "ours 4", "d 4", "d 4", "ours 4", "c 4"]
    assert [sides_of(row) for row in two.rows] == [["c", "o", "o", "c"], ["o", "d", "d", "o"]]


def test_a_killed_session_keeps_finished_runs_and_goes_on_after_them(tmp_path: Path) -> None:
    calls: list[str] = []

    def killed(setting: Setting, job: Job) -> float:
        if len(calls) == 4:
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        session(tmp_path, calls, {"ours": steady(), "b": steady(), "c": killed}).measure()
    calls.clear()
    session(tmp_path, calls, {"ours": steady(), "b": steady(), "c": steady()}).measure()
    assert calls == ["c 4", "ours 4", "b 4"]
    calls.clear()
    session(tmp_path, calls, {"ours": steady(), "b": steady(), "c": steady()}).measure()
    assert calls == []


def test_our_runs_of_a_finished_row_are_not_taken_for_another_one(tmp_path: Path) -> None:
    calls: list[str] = []
    session(tmp_path, calls, {"ours": steady(), "b": steady()}).measure()
    calls.clear()
    later = session(tmp_path, calls, {"ours": steady(), "b": steady(), "c": steady()})
    later.measure()
    assert calls == ["ours 4", "c 4", "c 4", "ours 4"], "they were not measured beside c"
    assert [len(row.raw["runs"]) for row in later.rows] == [4, 4]


def test_the_first_setting_that_fits_is_kept_and_what_did_not_fit_is_recorded(tmp_path: Path) -> None:
    calls: list[str] = []
    one = session(tmp_path, calls, {"ours": steady(), "b": out_of_memory("8", "4")}, {"b": "8,4,2"})
    one.measure()
    assert calls == ["b 8", "b 4", "b 2", "ours 4", "ours 4", "b 2"]
    assert [(t["setting"], t["outcome"]) for t in one.rows[0].raw["tries"]] == [
        ("8", "out of memory"), ("4", "out of memory"),
    ]  # fmt: skip


def test_the_search_for_the_best_tries_each_and_keeps_the_fastest(tmp_path: Path) -> None:
    calls: list[str] = []
    seconds = {"4": 3.0, "2+full": 1.0, "2": 2.0}

    def answer(setting: Setting, job: Job) -> float:
        return out_of_memory("8")(setting, job) * seconds[str(setting)]

    one = session(tmp_path, calls, {"ours": steady(), "b": answer}, {"b": "8,4,2+full,2"}, best=True, runs=1)
    one.measure()
    assert calls == ["b 8 for 10", "b 4 for 10", "b 2+full for 10", "b 2 for 10", "b 2+full", "ours 4"]
    tried = {t["setting"]: t.get("tokens_per_s") for t in one.rows[0].raw["tries"]}
    assert tried == {"8": None, "4": 256 / 3, "2+full": 256.0, "2": 128.0}


def test_a_side_that_fails_is_not_run_again_and_the_other_goes_on(tmp_path: Path) -> None:
    calls: list[str] = []
    one = session(tmp_path, calls, {"ours": steady(), "b": out_of_memory("4", "2")}, {"b": "4,2"})
    one.measure()
    assert calls == ["b 4", "b 2", "ours 4", "ours 4"]
    assert one.rows[0].raw["runs"][0]["error"] == "out of memory"


def test_earlier_settings_are_kept_when_a_session_goes_on(tmp_path: Path) -> None:
    calls: list[str] = []
    one = session(tmp_path, calls, {"ours": steady(), "b": out_of_memory("8")}, {"b": "8,4"})
    one.measure()
    one.rows[0].raw["runs"] = one.rows[0].raw["runs"][:2]
    save_raw(one.rows[0].path, one.rows[0].raw)
    calls.clear()
    session(tmp_path, calls, {"ours": steady(), "b": steady()}, {"b": "8,4"}).measure()
    assert calls == ["ours 4", "b 4"]


def test_a_run_cut_off_by_the_budget_is_no_failure_of_its_side(tmp_path: Path) -> None:
    def slow(setting: Setting, job: Job) -> float:
        raise TooSlow(f"stopped after {job.limit_s:.0f} s", ["b"], "")

    calls: list[str] = []
    short = session(tmp_path, calls, {"ours": steady(), "b": slow}, deadline=time.monotonic() + 5)
    with pytest.raises(OutOfTime):
        short.measure()
    assert short.rows[0].raw["runs"] == []
    unlimited = session(tmp_path, calls, {"ours": steady(), "b": slow})
    unlimited.measure()
    assert unlimited.rows[0].raw["runs"][0]["error"].startswith("stopped after 280")


def test_nothing_is_begun_that_cannot_end_in_time(tmp_path: Path) -> None:
    calls: list[str] = []
    late = session(tmp_path, calls, {"ours": steady(), "b": steady()}, deadline=time.monotonic() - 1)
    with pytest.raises(OutOfTime):
        late.measure()
    assert calls == []
