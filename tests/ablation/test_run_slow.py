"""A question of the checkout from the command line to the report, with the real trainer, killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = [
    "--training.steps",
    "6",
    "--validation.steps",
    "1",
    "--metrics.log_freq",
    "2",
    "--lr_scheduler.warmup_steps",
    "2",
]
QUESTION = """
base = "{base}"

[ablation]
variable = "optimizer.lr"
baseline = "low"
seeds = [1, 2]
decide = {{ metric = "validation_metrics/loss" }}

[arms.low]
optimizer.lr = 1e-3
[arms.high]
optimizer.lr = 1e-2
"""


def losses(folder: Path) -> dict[str, list[float]]:
    found = {}
    for path in sorted(folder.glob("*/seed*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.parent.relative_to(folder))] = [
            line["loss_metrics/global_avg_loss"] for line in lines if "loss_metrics/global_avg_loss" in line
        ]
    return found


@pytest.mark.slow
def test_killed_and_started_again_it_ends_with_the_same_losses_and_a_report(tmp_path):
    (tmp_path / "rates.toml").write_text(QUESTION.format(base=ROOT / "train_configs" / "debug_cpu.toml"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("ABLATION_TRAINER", None)
    command = [sys.executable, "-m", "ablation", "run", "rates.toml", *SHORT, "--job.dump_folder"]

    def start(folder: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*command, folder],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    undisturbed = start("whole")
    output, _ = undisturbed.communicate(timeout=900)
    assert undisturbed.returncode == 0, output
    cut = start("cut")
    second = tmp_path / "cut/rates/high/seed1-1gpu/metrics.jsonl"
    deadline = time.monotonic() + 600
    while not second.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    cut.kill()
    cut.communicate()
    again = start("cut")
    output, _ = again.communicate(timeout=900)
    assert again.returncode == 0, output
    assert "1 of 4 runs done" in output and "4 of 4 runs done" in output and "1 resumed" in output
    assert (
        losses(tmp_path / "cut/rates") == losses(tmp_path / "whole/rates") and len(losses(tmp_path / "cut/rates")) == 4
    )
    assert (tmp_path / "cut/rates/report/report.html").is_file()
