"""train.py as its user runs it: in processes of its own, on the debug configuration."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from config.load import load_file
from data import conditional_byte_entropy
from data.build import build_data

ROOT = Path(__file__).resolve().parents[1]
DEBUG = "train_configs/llama_debug.toml"
SMALL = [
    "--training.seq_len", "64", "--training.local_batch_size", "4", "--training.global_batch_size", "16",
    "--validation.steps", "2", "--metrics.log_freq", "5", "--lr_scheduler.warmup_steps", "2",
]  # fmt: skip


ON_CPU = os.environ | {"CUDA_VISIBLE_DEVICES": ""}


def launch(
    run_dir: Path, *options: str, ranks: int = 1, folder: Path = ROOT, environment: dict[str, str] = ON_CPU
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable]
    if ranks > 1:
        program += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [*program, str(ROOT / "train.py"), "--job.config_file", str(ROOT / DEBUG)]
    command += ["--job.run_dir", str(run_dir), *SMALL, *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    tag = "loss_metrics/global_avg_loss"
    return {line["step"]: line[tag] for line in lines(run_dir) if tag in line}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> Path:
    """20 steps on one process; the run directory."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    done = launch(run_dir, "--training.steps", "20", "--metrics.log_freq", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


def test_the_run_directory_tells_what_happened(one_process):
    present = {path.name for path in one_process.iterdir()}
    assert {"config.toml", "run.json", "environment.json", "metrics.jsonl", "tb", "DONE"} <= present
    record = json.loads((one_process / "run.json").read_text())
    assert record["parameters"]["total"] == 1_836_160
    assert record["derived"]["gradient_accumulation_steps"] == 4
    assert record["seeds"]["init_seed"] == record["seeds"]["data_seed"] == 0
    assert json.loads((one_process / "DONE").read_text())["steps"] == 20
    written = lines(one_process)
    assert [line["step"] for line in written] == list(range(21))
    assert {"validation_metrics/loss", "validation_metrics/bits_per_byte"} <= written[0].keys()
    assert written[20]["tokens"] == 20 * 16 * 64
    assert sum(len(line.get("step_times_s", [])) for line in written) == 20
    assert written[1]["lr"] > 0
    assert losses(one_process)[20] < losses(one_process)[1]


def test_the_recorded_configuration_launches_again_to_the_same_losses(one_process, tmp_path):
    again = tmp_path / "again"
    command = [sys.executable, str(ROOT / "train.py"), "--job.config_file", str(one_process / "config.toml")]
    done = subprocess.run(
        [*command, "--job.run_dir", str(again)], cwd=tmp_path, env=ON_CPU, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(again) == losses(one_process)


@pytest.mark.parametrize(
    "degrees",
    [
        ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"],
        ["--parallelism.data_parallel_shard_degree", "2"],
    ],
    ids=["ddp", "fsdp"],
)
def test_two_ranks_have_the_losses_of_one(one_process, tmp_path, degrees):
    run_dir = tmp_path / "two"
    done = launch(run_dir, "--training.steps", "20", "--metrics.log_freq", "1", *degrees, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = losses(one_process), losses(run_dir)
    assert one.keys() == two.keys()
    assert max(abs(one[step] - two[step]) for step in one) < 1e-3
    first, second = (lines(path)[0]["validation_metrics/loss"] for path in (one_process, run_dir))
    assert abs(first - second) < 1e-5


def test_a_finished_run_is_left_alone_and_another_configuration_refused(one_process):
    before = {path: path.stat().st_mtime_ns for path in one_process.rglob("*")}
    same = launch(one_process, "--training.steps", "20", "--metrics.log_freq", "1")
    other = launch(one_process, "--training.steps", "21", "--metrics.log_freq", "1")
    assert same.returncode == 0
    assert "DONE" in same.stdout
    assert other.returncode == 2
    assert "training.steps" in other.stderr and "Traceback" not in other.stderr
    assert before == {path: path.stat().st_mtime_ns for path in one_process.rglob("*")}


def test_a_killed_run_goes_on_from_its_checkpoint(one_process, tmp_path):
    run_dir = tmp_path / "killed"
    options = ["--training.steps", "20", "--metrics.log_freq", "1", "--checkpoint.enable", "--checkpoint.interval", "4"]
    command = [sys.executable, str(ROOT / "train.py"), "--job.config_file", str(ROOT / DEBUG)]
    command += ["--job.run_dir", str(run_dir), *SMALL, *options]
    victim = subprocess.Popen(command, env=ON_CPU, stdout=subprocess.DEVNULL)
    while not (run_dir / "checkpoint" / "step-8").exists():
        assert victim.poll() is None
        time.sleep(0.01)
    victim.kill()
    victim.wait()
    assert not (run_dir / "DONE").exists() and not (run_dir / "FAILED").exists()
    done = launch(run_dir, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Continuing after step" in done.stdout
    assert losses(run_dir) == losses(one_process)
    assert [line["step"] for line in lines(run_dir)] == list(range(21))
    times = [line["wall_s"] for line in lines(run_dir)]
    assert times == sorted(times)
    assert (run_dir / "attempts" / "1" / "metrics.jsonl").is_file()


def test_a_loss_that_is_not_finite_stops_the_run_and_is_named(tmp_path):
    run_dir = tmp_path / "diverged"
    done = launch(run_dir, "--training.steps", "10", "--optimizer.lr", "1e30", "--training.max_norm", "0")
    assert done.returncode == 1
    reason = json.loads((run_dir / "FAILED").read_text())["reason"]
    assert reason.startswith("step 2: loss nan") and "documents: " in reason
    assert reason in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("rank", "handler"), [("0", signal.default_int_handler), ("1", signal.SIG_DFL)])
def test_sigterm_is_an_interruption_on_the_rank_that_reports_it(monkeypatch, rank, handler):
    """On the others it ends the process, also one that waits in a collective: torchrun would give it 30 seconds."""
    monkeypatch.setenv("RANK", rank)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert train.main(["--training.stepz", "1"]) == 2
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_rank_of_a_machine_says_the_mistake_and_is_not_the_last_to_end(monkeypatch, capsys):
    waited: list[float] = []
    monkeypatch.setattr(train.time, "sleep", waited.append)
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)
    for rank, local_rank in (("2", "0"), ("3", "1")):  # of the second machine
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert train.main(["--training.stepz", "1"]) == 2
    assert capsys.readouterr().err.count("did you mean '--training.steps'") == 1
    assert waited == [train.SECONDS_TO_SPEAK]


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_checkpointing_with_document_masks_trains_alike(one_process, tmp_path, checkpointing):
    option = {"full": "2", "selective": "op"}[checkpointing]
    runs = []
    for mode in ("none", checkpointing):
        run_dir = tmp_path / mode
        done = launch(
            run_dir, "--training.steps", "3", "--metrics.log_freq", "1", "--data.document_mask",
            "--activation_checkpoint.mode", mode, "--activation_checkpoint.selective_ac_option", option,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        runs.append(losses(run_dir))
    assert runs[0] == pytest.approx(runs[1], abs=1e-6)


def test_the_default_run_learns_more_than_which_byte_follows_which(tmp_path):
    """The whole debug run: its held-out bits per byte are below H(next byte | previous byte) of the same documents."""
    run_dir = tmp_path / "default"
    command = [sys.executable, str(ROOT / "train.py"), "--job.config_file", str(ROOT / DEBUG)]
    done = subprocess.run(
        [*command, "--job.run_dir", str(run_dir)], cwd=tmp_path, env=ON_CPU, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pipeline = build_data(load_file(ROOT / DEBUG).config, dp_rank=0, dp_degree=1)
    entropy = conditional_byte_entropy("".join(d.text for d in pipeline.held_out_documents()).encode())
    bits = [line["validation_metrics/bits_per_byte"] for line in lines(run_dir) if "validation_metrics/loss" in line]
    print(f"H(next | previous) = {entropy:.3f} bits; held-out bits per byte {bits[0]:.3f} -> {bits[-1]:.3f}")
    assert bits[-1] < entropy
    assert math.isfinite(entropy) and 2.5 < entropy < 4.5


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_follow_one(tmp_path):
    fsdp = ["--parallelism.data_parallel_shard_degree", "2"]
    ddp = ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"]
    found = {}
    for name, ranks, options in (("one", 1, []), ("ddp", 2, ddp), ("fsdp", 2, fsdp)):
        done = launch(
            tmp_path / name,
            "--training.steps",
            "20",
            "--metrics.log_freq",
            "1",
            *options,
            ranks=ranks,
            environment=dict(os.environ),
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = losses(tmp_path / name)
    for name in ("ddp", "fsdp"):
        assert max(abs(found["one"][step] - found[name][step]) for step in found["one"]) < 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_bfloat16_follows_eager_float32(tmp_path):
    found = {}
    for name, options in (
        ("eager", []),
        ("compiled", ["--compile.enable", "--training.mixed_precision_param", "bfloat16"]),
    ):
        done = launch(
            tmp_path / name, "--training.steps", "20", "--metrics.log_freq", "1", *options, environment=dict(os.environ)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = losses(tmp_path / name)
    assert max(abs(found["eager"][step] - found["compiled"][step]) for step in found["eager"]) < 0.05
