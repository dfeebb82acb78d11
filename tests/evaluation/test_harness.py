"""What is kept of a results file, read from one that lm-eval 0.4.13 wrote (tests/assets), and lm-eval as a process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError
from evaluation import harness
from evaluation.harness import HarnessFailed, recorded_tasks, result_of, run_harness, versions_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def results() -> dict[str, Any]:
    """Of ``--tasks stdlib,stdlib_spelled --limit 20``: a group of one task, and a task with a filter."""
    return json.loads((ROOT / "tests/assets/lm_eval_results.json").read_text())


def test_a_task_has_its_metrics_with_their_errors(results):
    result = result_of("stdlib_names", results)
    assert result["metrics"] == {
        name: {"value": 0.4, "stderr": 0.11239029738980327, "higher_is_better": True} for name in ("acc", "acc_norm")
    }
    assert (result["samples"], result["fewshot"], result["version"]) == (20, 0, 1.0)
    assert result["settings"]["doc_to_text"].startswith("import {{module}}") and result["subtasks"] == {}
    assert "pretrained" not in result["settings"]["metadata"], "a folder that is gone"


def test_a_filter_is_part_of_the_name(results):
    assert list(result_of("stdlib_spelled", results)["metrics"]) == ["exact_match,first-word"]


def test_a_group_holds_its_tasks(results):
    result = result_of("stdlib", results)
    assert list(result["metrics"]) == ["acc"] and result["metrics"]["acc"]["value"] == 0.4
    assert list(result["subtasks"]) == ["stdlib_names"] and "acc_norm" in result["subtasks"]["stdlib_names"]
    results["group_subtasks"] |= {"stdlib": ["inner"], "inner": ["stdlib_names"]}
    assert list(result_of("stdlib", results)["subtasks"]) == ["stdlib_names"], "at any depth"


def test_an_error_that_is_no_number_is_left_out(results):
    results["results"]["stdlib_names"]["acc_stderr,none"] = "N/A"
    assert result_of("stdlib_names", results)["metrics"]["acc"]["stderr"] is None


def test_records_are_of_what_was_asked_for_and_of_what_a_tag_stands_for(results):
    assert sorted(recorded_tasks(["stdlib", "stdlib_spelled"], results)) == ["stdlib", "stdlib_spelled"]
    assert sorted(recorded_tasks(["some_tag"], results)) == ["stdlib", "stdlib_spelled"]
    assert "stdlib_names" in recorded_tasks(["stdlib", "stdlib_names"], results)


def test_versions(results):
    assert versions_of(results)["lm_eval"] == "0.4.13"
    assert versions_of(results)["seeds"]["fewshot_seed"] == 1234


def run_as(program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """``run_harness`` with a module lm_eval that is ``program``."""
    (tmp_path / "lm_eval.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    return run_harness(
        tmp_path, ["a", "b"], dtype="float32", device="cpu", batch_size="8", limit=3, include_path=tmp_path
    )


WRITE = """
import importlib.util, json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--output_path") + 1]) / "model"
out.mkdir(parents=True)
found = importlib.util.find_spec("evaluate")
said = {"arguments": sys.argv[1:], "evaluate": found and found.origin, "path": sys.path}
(out / "results_2026-11-30.json").write_text(json.dumps(said))
"""


def test_what_it_is_asked(monkeypatch, tmp_path):
    said = run_as(WRITE, monkeypatch, tmp_path)
    line = " ".join(said["arguments"])
    assert line.startswith(f"--model hf --tasks a,b --model_args pretrained={tmp_path},dtype=float32 --device cpu")
    assert line.endswith(f"--limit 3 --include_path {tmp_path}")


def test_the_checkout_is_not_on_its_path(monkeypatch, tmp_path):
    """It would import this checkout's evaluate.py for the package of that name."""
    said = run_as(WRITE, monkeypatch, tmp_path)
    assert str(ROOT) not in said["path"] and "" not in said["path"]
    assert said["evaluate"] is None or Path(said["evaluate"]).parent != ROOT


def test_an_unknown_task_is_a_users_mistake(monkeypatch, tmp_path, capfd):
    with pytest.raises(ConfigError, match=r"--tasks a,b: lm-eval knows no b\. .*--include_path"):
        run_as('print("loading", flush=True)\nraise ValueError("Tasks not found: b")', monkeypatch, tmp_path)
    printed = capfd.readouterr().err
    assert "loading" in printed and "Traceback" not in printed


def test_another_error_is_shown_whole(monkeypatch, tmp_path, capfd):
    with pytest.raises(HarnessFailed, match="exit code 1 and 0 results files"):
        run_as('raise RuntimeError("out of memory")', monkeypatch, tmp_path)
    assert "Traceback" in (printed := capfd.readouterr().err) and "out of memory" in printed


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(harness, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(ConfigError, match=r'no_such_package cannot be imported.*pip install -e "\.\[eval\]"'):
        harness.check_installed()
    assert "no_such_package" not in sys.modules
