"""Windows: which steps they hold, what they leave behind, on which ranks. tests/test_train_profiling.py has runs."""

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from config.profiling_schema import Profiling
from trainer.profiling import Profiler, Schedule
from trainer.spans import BACKWARD, FORWARD, OPTIMIZER, span

CPU = torch.device("cpu")


def alone(tags):
    return [tags]


def train(profiler, steps, device=CPU, first=1):
    """Steps with the parts of a real one; returns (tags by step, excluded by step)."""
    weight = torch.randn(256, 256, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    tags, excluded = {}, {}
    for step in range(first, steps + 1):
        if reason := profiler.begin(step):
            excluded[step] = reason
        with span(FORWARD):
            loss = (weight @ weight).square().mean()
        with span(BACKWARD):
            loss.backward()
        with span(OPTIMIZER):
            optimizer.step()
            optimizer.zero_grad()
        if profiler.ends(step):
            tags[step] = profiler.end(step)
    return tags, excluded


def test_the_last_steps_of_each_period_are_recorded():
    schedule = Schedule(freq=5, warmup=1, active=2, steps=13)
    assert "".join(schedule.at(step)[0] for step in range(1, 14)) == "oowaaoowaaooo", "a window that fits alone"
    full = Schedule(freq=3, warmup=1, active=2, steps=6)
    assert "".join(full.at(step)[0] for step in range(1, 7)) == "waawaa"


def test_a_window_leaves_a_trace_a_table_and_a_split(tmp_path):
    section = Profiling(enable_profiling=True, profile_freq=3, profiler_warmup=1, profiler_active=2)
    profiler = Profiler(section, steps=7, rank=0, device=CPU, gather=alone)
    profiler.open(tmp_path)
    tags, excluded = train(profiler, 7)
    assert excluded == dict.fromkeys(range(1, 7), "profiling")
    assert sorted(p.name for p in (tmp_path / "profile_traces").iterdir()) == ["iteration_3", "iteration_6"]
    folder = tmp_path / "profile_traces" / "iteration_6"
    assert sorted(p.name for p in folder.iterdir()) == [
        "rank0_kernels.json", "rank0_kernels.txt", "rank0_time_split.json", "rank0_time_split.txt",
        "rank0_trace.json.gz",
    ]  # fmt: skip
    with gzip.open(folder / "rank0_trace.json.gz") as file:
        names = [e["name"] for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"]
    assert names.count("train/forward") == names.count("train/backward") == 2 and names.count("train/window") == 1
    split = json.loads((folder / "rank0_time_split.json").read_text())
    assert (split["rank"], split["steps"], split["device"]) == (0, 2, "cpu")
    assert sum(split["parts_s"].values()) == pytest.approx(split["step_s"])
    assert min(split["parts_s"][name] for name in ("forward", "backward", "optimizer")) > 0
    assert tags[6]["profiling/forward(s)"] == split["parts_s"]["forward"] and tags[6]["comm/total(%)"] == 0
    table = json.loads((folder / "rank0_kernels.json").read_text())
    gemms = {row["name"]: row["calls"] for row in table["kernels"] if row["kind"] == "GEMM"}
    assert gemms["aten::mm"] == 2 * 3, "one forward, two backward, in each of two steps"
    assert table["total_us"] <= 2 * split["step_s"] * 1e6, "operators are inside the window, each moment in one"


def test_a_run_that_goes_on_inside_a_window_records_what_is_left_of_it(tmp_path):
    section = Profiling(enable_profiling=True, profile_freq=10, profiler_warmup=3, profiler_active=2)
    profiler = Profiler(section, steps=10, rank=0, device=CPU, gather=alone)
    profiler.open(tmp_path)
    tags, _ = train(profiler, 10, first=10)
    split = json.loads((tmp_path / "profile_traces/iteration_10/rank0_time_split.json").read_text())
    assert split["steps"] == 1 and tags[10]


@pytest.mark.parametrize(("last", "state"), [(1, "warm-up"), (3, "active")])
def test_a_run_that_ends_inside_a_window_gives_it_up(tmp_path, last, state):
    section = Profiling(enable_profiling=True, profile_freq=4, profiler_warmup=2, profiler_active=2)
    profiler = Profiler(section, steps=8, rank=0, device=CPU, gather=alone)
    profiler.open(tmp_path)
    assert profiler._schedule.at(last) == state
    train(profiler, last)
    profiler.close()
    assert not torch.autograd._profiler_enabled() and list(tmp_path.iterdir()) == []
    with torch.profiler.profile() as another:  # nothing of it is left behind
        torch.ones(2)
    assert [event.key for event in another.key_averages() if event.key == "aten::ones"]


def test_ranks_that_do_not_record_know_the_tags_and_leave_the_steps_out(tmp_path):
    section = Profiling(enable_profiling=True, profile_freq=4, ranks=[1, 2])
    others = [{"profiling/step(s)": 1.0}, {"profiling/step(s)": 3.0}]
    profiler = Profiler(section, steps=4, rank=0, device=CPU, gather=lambda tags: [tags, *others])
    profiler.open(tmp_path)
    tags, excluded = train(profiler, 4)
    assert tags == {4: {"profiling/step(s)": 2.0}}, "the mean over those that recorded"
    assert set(excluded) == {1, 2, 3, 4} and not (tmp_path / "profile_traces").exists()


def test_nothing_happens_while_it_is_off(tmp_path):
    profiler = Profiler(Profiling(profile_freq=2), steps=4, rank=0, device=CPU, gather=alone)
    profiler.open(tmp_path)
    assert train(profiler, 4) == ({}, {}) and list(tmp_path.iterdir()) == []


def test_a_trace_that_cannot_be_read_does_not_end_training(tmp_path, monkeypatch, caplog):
    def unreadable(events):
        raise ValueError("no range")

    monkeypatch.setattr("trainer.profiling.read_window", unreadable)
    profiler = Profiler(Profiling(enable_profiling=True, profile_freq=4), steps=4, rank=0, device=CPU, gather=alone)
    profiler.open(tmp_path)
    assert train(profiler, 4)[0] == {4: {}}
    assert "gives no table and no split: no range" in caplog.text
    assert [p.name for p in (tmp_path / "profile_traces/iteration_4").iterdir()] == ["rank0_trace.json.gz"]


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_split_by_what_launched_them(tmp_path):
    device = torch.device("cuda")
    section = Profiling(enable_profiling=True, profile_freq=6, profiler_warmup=2, profiler_active=2)
    profiler = Profiler(section, steps=6, rank=0, device=device, gather=alone)
    profiler.open(tmp_path)
    tags, _ = train(profiler, 6, device)
    folder = tmp_path / "profile_traces" / "iteration_6"
    split = json.loads((folder / "rank0_time_split.json").read_text())
    assert split["device"] == "cuda" and sum(split["parts_s"].values()) == pytest.approx(split["step_s"])
    assert min(split["parts_s"][name] for name in ("forward", "backward", "optimizer")) > 0
    assert split["parts_s"]["idle"] > 0 and split["communication_s"] == 0
    table = json.loads((folder / "rank0_kernels.json").read_text())
    assert table["device"] == "cuda" and not any(row["name"].startswith("aten::") for row in table["kernels"])
    gemms = sum(row["calls"] for row in table["kinds"] if row["kind"] == "GEMM")
    assert gemms >= 2 * 3, "more where a product is split"
    assert {row["kind"] for row in table["kinds"]} >= {"GEMM", "elementwise", "optimizer"}
    busy = split["step_s"] - split["parts_s"]["idle"] - split["parts_s"]["data_wait"]
    assert table["total_us"] / 2e6 == pytest.approx(busy, rel=0.05), "one stream: the table and the split agree"
    assert tags[6]["profiling/idle(s)"] == split["parts_s"]["idle"]


@pytest.mark.parametrize("rank", [0, 3])
def test_what_is_held_when_memory_runs_out_is_kept_by_any_rank_without_being_asked_for(tmp_path, monkeypatch, rank):
    profiler = Profiler(Profiling(), steps=4, rank=rank, device=torch.device("cuda"), gather=alone)
    assert profiler.last_snapshot() == "", "no run directory yet"
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"held"))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: pytest.fail("it slows every step"))
    profiler.open(tmp_path)
    assert profiler.begin(3) == "" and not profiler.ends(4)
    path = tmp_path / "memory_snapshot" / "iteration_3_exit" / f"rank{rank}_memory_snapshot.pickle"
    assert profiler.last_snapshot() == f". Memory snapshot: {path}" and path.read_bytes() == b"held"


def test_a_snapshot_that_cannot_be_written_hides_no_reason(tmp_path, monkeypatch):
    profiler = Profiler(Profiling(), steps=4, rank=0, device=torch.device("cuda"), gather=alone)
    (tmp_path / "memory_snapshot").write_text("a file where the folder would be")
    profiler.open(tmp_path)
    assert profiler.last_snapshot().startswith(". No memory snapshot: ")


def test_on_a_cpu_there_is_no_snapshot(tmp_path):
    profiler = Profiler(Profiling(), steps=4, rank=0, device=torch.device("cpu"), gather=alone)
    profiler.open(tmp_path)
    assert profiler.last_snapshot() == "" and not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_memory_snapshots_hold_allocations_with_python_lines(tmp_path):
    device = torch.device("cuda")
    section = Profiling(enable_memory_snapshot=True, profile_freq=2)
    profiler = Profiler(section, steps=4, rank=0, device=device, gather=alone)
    try:
        profiler.open(tmp_path)
        tags, excluded = train(profiler, 4, device)
        words = profiler.last_snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert tags == {2: {}, 4: {}} and set(excluded.values()) == {"memory history"} and len(excluded) == 4
    folders = sorted(p.name for p in (tmp_path / "memory_snapshot").iterdir())
    assert folders == ["iteration_2", "iteration_4", "iteration_4_exit"]
    path = tmp_path / "memory_snapshot" / "iteration_4" / "rank0_memory_snapshot.pickle"
    snapshot = pickle.loads(path.read_bytes())
    history = [entry for trace in snapshot["device_traces"] for entry in trace]
    assert any(entry["action"] == "alloc" for entry in history)
    frames = {frame["filename"] for entry in history for frame in entry.get("frames", [])}
    assert any(name.endswith("test_profiling.py") for name in frames)
    assert words.startswith(". Memory snapshot: ") and "iteration_4_exit" in words
