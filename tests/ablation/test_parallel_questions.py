"""Every question about how a model is spread: it passes the guard, and runs from the command line to its report."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ablation.guard import guard
from ablation.question import find, read

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (
    "context_parallel_layout",
    "context_parallel_method",
    "data_parallel",
    "ddp_vs_fsdp2",
    "fsdp_vs_ep",
    "fsdp_vs_tp_vs_pp",
    "moe_comm_overlap",
    "moe_dispatcher",
    "pipeline_schedules",
    "tensor_vs_fsdp",
    "compile",
)
SHORT = [
    "--training.steps", "4", "--lr_scheduler.warmup_steps", "2", "--metrics.log_freq", "1",
    "--validation.freq", "4", "--validation.steps", "1",
]  # fmt: skip
LOSS = "loss_metrics/global_avg_loss"


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_changes_one_variable_on_every_number_of_ranks_it_names(name):
    question = read(find(name))
    for ranks in question.table.runs_on.get("gpus", [1]):
        assert guard(question, world_size=ranks).violations == []


def decided_early(path: Path, folder: Path) -> Path:
    """A copy of the question, beside copies of its bases, that decides at step 4: its own 40 take minutes an arm, and
    so does inductor, which compiles C++ here.
    """
    (folder / "ablations").mkdir(parents=True)
    for base in (ROOT / "train_configs").glob("*.toml"):
        shutil.copy(base, folder)
    text, count = re.subn(r"(?m)^step( *)= 40$", r"step\1= 4", path.read_text())
    assert count == 1, path
    text = text.replace("compile.enable = true", 'compile.enable = true\ncompile.backend = "aot_eager"')
    copy = folder / "ablations" / path.name
    copy.write_text(text)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_runs_to_its_report_and_its_arms_learn_alike(name, tmp_path):
    """Layouts compute in bfloat16 here, with other roundings: losses agree to that, and would not for other data."""
    question = read(decided_early(find(name), tmp_path / "train_configs"))
    ranks = min(question.table.runs_on.get("gpus", [1]))
    arms = guard(question).arms
    command = [sys.executable, "-m", "ablation", "run", str(question.path), "--seeds", "1", *SHORT]
    environment = os.environ | {"NGPU": str(ranks), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("ABLATION_TRAINER", None)
    done = subprocess.run(
        [*command, "--job.dump_folder", str(tmp_path / "outputs")],
        cwd=ROOT, env=environment, text=True, capture_output=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "outputs" / name
    assert (folder / "report" / "report.html").is_file()
    losses = {}
    for arm in arms:
        metrics = folder / arm / f"seed1-{ranks}gpu" / "metrics.jsonl"
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses[arm] = [line[LOSS] for line in lines if LOSS in line]
    baseline = losses[question.table.baseline]
    assert len(baseline) == 4 and baseline[-1] < baseline[0]
    alike: dict[int, list[float]] = {}  # sequences of another length are other data
    for arm, found in losses.items():
        first = alike.setdefault(arms[arm].flat["training.seq_len"], found)
        assert found == pytest.approx(first, abs=5e-3), arm
