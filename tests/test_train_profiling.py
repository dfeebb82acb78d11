"""Profiles of runs as their user starts them."""

import gzip
import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from tests.test_train import DEBUG, ON_CPU, ROOT
from trainer.spans import span

TINY = [
    "--model.n_layers", "2", "--training.seq_len", "32", "--training.local_batch_size", "2", "--validation.enable",
    "false", "--training.global_batch_size", "4", "--lr_scheduler.warmup_steps", "2", "--metrics.log_freq", "100",
    "--profiling.enable_profiling", "--profiling.profiler_warmup", "1",
]  # fmt: skip
WINDOW_FILES = {"kernels.json", "kernels.txt", "time_split.json", "time_split.txt", "trace.json.gz"}


def command(run_dir: Path, *options: str, ranks: int = 1) -> list[str]:
    program = [sys.executable]
    if ranks > 1:
        program += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    configuration = ["--job.config_file", str(ROOT / DEBUG), "--job.run_dir", str(run_dir)]
    return [*program, str(ROOT / "train.py"), *configuration, *TINY, *options]


def launch(run_dir: Path, *options: str, ranks: int = 1, environment=ON_CPU) -> subprocess.CompletedProcess[str]:
    words = command(run_dir, *options, ranks=ranks)
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)


def window(run_dir: Path, step: int, rank: int = 0) -> dict[str, dict]:
    """The .json files of a window by their names, after a look at the others."""
    folder = run_dir / "profile_traces" / f"iteration_{step}"
    prefix = f"rank{rank}_"
    files = {p.name.removeprefix(prefix): p for p in folder.iterdir() if p.name.startswith(prefix)}
    assert files.keys() == WINDOW_FILES
    with gzip.open(files["trace.json.gz"]) as trace:
        assert len(json.load(trace)["traceEvents"]) > 500
    return {name: json.loads(files[f"{name}.json"].read_text()) for name in ("kernels", "time_split")}


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_windows_of_a_run_that_was_killed_and_went_on(tmp_path):
    """Every window is in metrics.jsonl once; the earlier attempt's files are as they were."""
    run_dir = tmp_path / "run"
    options = ["--training.steps", "13", "--profiling.profile_freq", "4", "--profiling.profiler_active", "2"]
    options += ["--checkpoint.enable", "--checkpoint.interval", "4"]
    victim = subprocess.Popen(command(run_dir, *options), env=ON_CPU, stdout=subprocess.DEVNULL)
    while not (run_dir / "checkpoint" / "step-4").exists():
        assert victim.poll() is None
        time.sleep(0.02)
    victim.kill()
    victim.wait()
    before = content(run_dir / "profile_traces" / "iteration_4")
    done = launch(run_dir, *options)
    assert done.returncode == 0, done.stdout + done.stderr

    earlier = run_dir / "attempts" / "1" / "profile_traces" / "iteration_4"
    assert content(earlier) == before and len(before) == len(WINDOW_FILES)
    assert not [p for p in (run_dir / "attempts").rglob("*tfevents*")], "TensorBoard would draw them again"
    assert sorted(p.name for p in (run_dir / "profile_traces").iterdir()) == ["iteration_12", "iteration_8"]
    split = window(run_dir, 8)["time_split"]
    assert split["steps"] == 2 and sum(split["parts_s"].values()) == pytest.approx(split["step_s"])
    parts = split["parts_s"]
    assert min(parts[name] for name in ("forward", "backward", "optimizer")) > 0
    assert parts["exposed_communication"] == 0
    kinds = {row["kind"]: row["share"] for row in window(run_dir, 8)["kernels"]["kinds"]}
    assert min(kinds[name] for name in ("GEMM", "attention", "optimizer")) > 0

    told = {line["step"]: line for line in lines(run_dir)}
    profiled = {step: line for step, line in told.items() if "profiling/step(s)" in line}
    assert sorted(profiled) == [4, 8, 12], "the first attempt's is carried over"
    assert profiled[8]["profiling/backward(s)"] == parts["backward"] and profiled[8]["comm/exposed(%)"] == 0
    excluded = {step for line in told.values() for step in line["excluded_steps"]}
    assert excluded == {1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12}, "warm-up of each attempt, and all that was profiled"
    assert "clocks_at_end" in json.loads((run_dir / "run.json").read_text())


def test_two_ranks_tell_communication_from_work(tmp_path):
    run_dir = tmp_path / "run"
    options = ["--training.steps", "4", "--profiling.profile_freq", "4", "--profiling.ranks", "[]"]
    done = launch(run_dir, *options, "--parallelism.data_parallel_shard_degree", "2", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    shares = []
    for rank in (0, 1):
        found = window(run_dir, 4, rank)
        split, table = found["time_split"], found["kernels"]
        assert 0 < split["parts_s"]["exposed_communication"] <= split["communication_s"] < split["step_s"]
        messages = [row for row in table["kernels"] if row["kind"] == "communication"]
        assert {"gloo:all_gather", "gloo:all_reduce"} <= {row["name"] for row in messages}
        shares.append(100 * split["parts_s"]["exposed_communication"] / split["step_s"])
    (line,) = [line for line in lines(run_dir) if "comm/exposed(%)" in line]
    assert line["comm/exposed(%)"] == pytest.approx(sum(shares) / 2), "the mean of the ranks that recorded"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--profiling.enable_memory_snapshot"], "and this machine has no GPU"),
        (["--profiling.profile_freq", "1"], "is shorter than a window"),
        (["--profiling.ranks", "[1]"], "there is no rank 1 among 1"),
    ],
)
def test_wrong_values_are_one_message(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    monkeypatch.setattr(train, "pick_device", lambda local_rank: torch.device("cpu"))
    assert train.main(command(tmp_path / "run", *options)[2:]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_running_out_of_memory_is_a_reason_and_no_traceback(tmp_path, monkeypatch, capsys):
    def no_memory_left(config, mesh, device, pipeline, run, watch, profiler):
        profiler.step = 7
        with span("backward"):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity ..."
            )

    monkeypatch.setattr(train, "train", no_memory_left)
    monkeypatch.setattr(train, "pick_device", lambda local_rank: torch.device("cpu"))
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    assert train.main(command(tmp_path / "run", "--training.steps", "4", "--profiling.profile_freq", "4")[2:]) == 1
    reason = "out of memory in step 7, backward, on rank 0: 2.00 GiB more were asked for"
    told = json.loads((tmp_path / "run" / "FAILED").read_text())["reason"]
    assert told.startswith(reason) and "would save most of the peak" in told
    said = capsys.readouterr()
    assert reason in said.err and "Traceback" not in said.err + said.out


@pytest.mark.gpu
def test_a_run_on_a_gpu(tmp_path):
    run_dir = tmp_path / "run"
    options = ["--training.steps", "8", "--profiling.profile_freq", "4", "--profiling.enable_memory_snapshot"]
    options += ["--training.mixed_precision_param", "bfloat16"]  # in float32 grouped queries have no attention kernel
    done = launch(run_dir, *options, environment=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (4, 8):
        found = window(run_dir, step)
        split, table = found["time_split"], found["kernels"]
        parts = split["parts_s"]
        assert split["device"] == table["device"] == "cuda"
        assert sum(parts.values()) == pytest.approx(split["step_s"])
        assert min(parts[name] for name in ("forward", "backward", "optimizer", "idle")) > 0
        assert parts["exposed_communication"] == 0
        kinds = {row["kind"] for row in table["kinds"]}
        assert {"GEMM", "attention", "memory copy", "optimizer", "elementwise"} <= kinds
        assert not [row["name"] for row in table["kernels"] if row["name"].startswith("aten::")]
        snapshot = run_dir / "memory_snapshot" / f"iteration_{step}" / "rank0_memory_snapshot.pickle"
        assert pickle.loads(snapshot.read_bytes())["segments"]
    assert {step for line in lines(run_dir) for step in line["excluded_steps"]} == set(range(1, 9))
    clocks = json.loads((run_dir / "run.json").read_text())["clocks_at_end"]
    assert clocks is None or clocks["sm_mhz"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_running_out_of_memory_is_one_sentence_with_a_snapshot(tmp_path, recorded):
    """Logits of 65,536 tokens over a million words are 262 GB in float32."""
    run_dir = tmp_path / "run"
    large = ["--training.seq_len", "256", "--training.local_batch_size", "256", "--training.global_batch_size", "256"]
    large += ["--model.vocab_size", "1000000", "--training.steps", "4"]
    large += ["--profiling.enable_memory_snapshot"] * recorded
    done = launch(run_dir, *large, environment=dict(os.environ))
    assert done.returncode == 1, done.stdout + done.stderr
    reason = json.loads((run_dir / "FAILED").read_text())["reason"]
    assert reason.startswith("out of memory in step 1, forward, on rank 0") or ", backward, " in reason
    assert "peak active" in reason and "peak reserved" in reason
    snapshot = pickle.loads(Path(reason.partition("Memory snapshot: ")[2]).read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"]) == recorded
    assert reason in done.stderr and "Traceback" not in done.stderr


@pytest.mark.multi_gpu
def test_two_gpus_tell_exposed_communication(tmp_path):
    run_dir = tmp_path / "run"
    options = ["--training.steps", "4", "--profiling.profile_freq", "4", "--profiling.ranks", "[]"]
    options += ["--parallelism.data_parallel_shard_degree", "2"]
    done = launch(run_dir, *options, ranks=2, environment=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        found = window(run_dir, 4, rank)
        split = found["time_split"]
        assert split["device"] == "cuda"
        assert 0 <= split["parts_s"]["exposed_communication"] <= split["communication_s"] <= split["step_s"]
        assert split["communication_s"] > 0
        names = [row["name"] for row in found["kernels"]["kernels"] if row["kind"] == "communication"]
        assert any("AllGather" in name for name in names) and any("ReduceScatter" in name for name in names)
