"""evaluate.py: with lm-eval on a task of this checkout, and without it on a results file that lm-eval wrote."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import evaluate
from ablation.held_out import read_evaluations
from evaluation import harness
from tests.trained_run import ROOT

RECORDED = ROOT / "tests" / "assets" / "lm_eval_results.json"
TASKS = str(ROOT / "tests" / "assets" / "tasks")


@pytest.fixture
def run_dir(trained_run, tmp_path) -> Path:
    """A copy that may be evaluated."""
    return shutil.copytree(trained_run, tmp_path / "run")


@pytest.fixture
def recorded(monkeypatch):
    """lm-eval replaced by what it once wrote; what it was asked."""
    asked = {}

    def run_harness(model: Path, tasks, **options):
        asked.update(options, tasks=list(tasks), files=sorted(p.name for p in model.iterdir()))
        return json.loads(RECORDED.read_text())

    monkeypatch.setattr(evaluate, "run_harness", run_harness)
    monkeypatch.setattr(harness, "NEEDED", ())
    return asked


def files(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "evaluations").iterdir())


def test_results_come_into_the_run_directory(run_dir, recorded, capsys):
    assert evaluate.main([str(run_dir), "--tasks", "stdlib,stdlib_spelled", "--step", "20", "--device", "cpu"]) == 0
    assert recorded["files"] == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert recorded["tasks"] == ["stdlib", "stdlib_spelled"] and recorded["dtype"] == "float32"
    assert files(run_dir) == ["stdlib-step20.json", "stdlib_spelled-step20.json"], "and the export is gone"
    record = json.loads((run_dir / "evaluations" / "stdlib-step20.json").read_text())
    assert (record["task"], record["step"], record["checkpoint"]) == ("stdlib", 20, "checkpoint/step-20")
    assert record["with"]["lm_eval"] == "0.4.13" and "stdlib_names" in record["subtasks"]
    assert read_evaluations(run_dir)["eval/stdlib/acc"] == [(20, 0.4)]
    assert list((run_dir / "tb" / "evaluations").iterdir())
    assert "stdlib  acc  0.4000 +- 0.1124" in capsys.readouterr().out


def test_no_result_is_overwritten(run_dir, recorded, capsys):
    command = [str(run_dir), "--tasks", "stdlib,stdlib_spelled", "--device", "cpu"]
    assert evaluate.main(command) == 0
    before = {name: (run_dir / "evaluations" / name).read_bytes() for name in files(run_dir)}
    recorded.clear()
    assert evaluate.main(command) == 2 and recorded == {}, "said before anything is run"
    assert "stdlib-step40.json" in (said := capsys.readouterr().err) and "evaluated before" in said
    (run_dir / "evaluations" / "stdlib_spelled-step40.json").unlink()
    assert evaluate.main([*command[:2], "some_tag", "--device", "cpu"]) == 2, "a tag stands for both"
    assert {name: (run_dir / "evaluations" / name).read_bytes() for name in files(run_dir)}.items() >= {
        ("stdlib-step40.json", before["stdlib-step40.json"])
    }
    assert "stdlib_spelled-step40.json" in files(run_dir), "the other is kept"


def test_a_trial_is_kept_apart(run_dir, recorded):
    assert evaluate.main([str(run_dir), "--tasks", "stdlib", "--limit", "20", "--device", "cpu"]) == 0
    assert recorded["limit"] == 20 and "stdlib-step40-limit20.json" in files(run_dir)
    assert read_evaluations(run_dir) == {} and not (run_dir / "tb" / "evaluations").exists()


def test_a_failure_leaves_nothing(run_dir, recorded, monkeypatch, capsys):
    def fail(*_, **__):
        raise harness.HarnessFailed("lm-eval ended with exit code 1")

    monkeypatch.setattr(evaluate, "run_harness", fail)
    assert evaluate.main([str(run_dir), "--tasks", "stdlib", "--device", "cpu"]) == 1
    assert files(run_dir) == [] and "exit code 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, blamed",
    [
        (["--tasks", " , "], "names no task"),
        (["--tasks", "a", "--limit", "0"], "--limit 0: must be at least 1"),
        (["--tasks", "a", "--batch_size", "many"], "--batch_size many"),
        (["--tasks", "a", "--include_path", "nowhere"], "--include_path nowhere: no such folder"),
        (["--tasks", "a", "--step", "7"], "--step 7: "),
    ],
)
def test_a_mistake_is_one_message(trained_run, recorded, options, blamed, capsys):
    assert evaluate.main([str(trained_run), *options]) == 2
    assert blamed in capsys.readouterr().err and recorded == {}


def test_what_is_no_run_is_a_mistake(recorded, tmp_path, capsys):
    assert evaluate.main([str(tmp_path / "nowhere"), "--tasks", "a"]) == 2
    assert "no run directory" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in harness.NEEDED), reason='needs the extra "eval"'
)
def test_lm_eval_on_a_task_of_this_checkout(run_dir):
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = os.environ | offline | {"HF_HOME": str(run_dir.parent / "hf"), "PYTHONPATH": str(ROOT)}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "evaluate.py"), str(run_dir), "--include_path", TASKS, *options]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)

    done = run("--tasks", "stdlib_names")
    assert done.returncode == 0, done.stderr
    assert files(run_dir) == ["stdlib_names-step40.json"]
    record = json.loads((run_dir / "evaluations" / "stdlib_names-step40.json").read_text())
    assert record["samples"] == 36 and set(record["metrics"]) == {"acc", "acc_norm"}
    assert 0.0 <= record["metrics"]["acc"]["value"] <= 1.0
    assert f"stdlib_names  acc  {record['metrics']['acc']['value']:.4f}" in done.stdout

    unknown = run("--tasks", "stdlib_names_", "--limit", "2")
    assert unknown.returncode == 2 and "lm-eval knows no stdlib_names_" in unknown.stderr
    assert "Traceback" not in unknown.stderr
