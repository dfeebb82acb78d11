"""A question on disk and a trainer that takes its place in milliseconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

BASE = """
[training]
steps = 100
seq_len = 128
local_batch_size = 2
global_batch_size = 8
[validation]
enable = true
freq = 50
"""

QUESTION = """
base = "base.toml"
[ablation]
question = "Which rate?"
variable = "optimizer.lr"
baseline = "low"
seeds = [1, 2]
decide = { metric = "validation_metrics/loss", step = 100 }

[arms.low]
optimizer.lr = 1e-3
[arms.high]
optimizer.lr = 2e-3
[arms.higher]
optimizer.lr = 3e-3
"""


@pytest.fixture
def question_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """rates.toml in an empty working directory, to be run by the fake trainer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ABLATION_TRAINER", str(Path(__file__).with_name("fake_trainer.py")))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.delenv("NGPU", raising=False)
    (tmp_path / "base.toml").write_text(BASE)
    path = tmp_path / "rates.toml"
    path.write_text(QUESTION)
    return path
