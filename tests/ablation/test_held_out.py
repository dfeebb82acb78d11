"""Held-out tasks, recorded beside runs, come out of a comparison."""

import json
from pathlib import Path

import pytest

from ablation.held_out import read_evaluations
from ablation.result import build_result
from ablation.runs import find_runs
from config.errors import ConfigError
from tests.ablation.synthetic import three_arms, write_ablation


def write(run_dir: Path, step: int, value: float, limit: int | None = None) -> None:
    """As evaluation/record.py does (its own test holds the two together)."""
    (run_dir / "evaluations").mkdir(exist_ok=True)
    result = {"task": "arc", "step": step, "limit": limit, "metrics": {"acc": {"value": value, "stderr": 0.01}}}
    name = f"arc-step{step}.json" if limit is None else f"arc-step{step}-limit{limit}.json"
    (run_dir / "evaluations" / name).write_text(json.dumps(result))


def test_a_task_is_a_row_of_the_paired_table(tmp_path):
    folder = write_ablation(tmp_path, three_arms())
    for arm, effect in (("wd_0.1", 0.0), ("wd_0.01", 0.05)):
        for seed in (1, 2, 3):
            write(folder / arm / f"seed{seed}-1gpu", 60, 0.3 + 0.1 * seed + effect)
            write(folder / arm / f"seed{seed}-1gpu", 60, 0.9, limit=3)
            write(folder / "wd_0.2" / f"seed{seed}-1gpu", 60, 0.9, limit=3)
    result = build_result(find_runs([folder]))
    rows = {c["arm"]: {row["name"]: row for row in c["metrics"]} for c in result["comparisons"]}
    row = rows["wd_0.01"]["arc/acc"]
    assert row["kind"] == "difference" and row["n"] == 3 and row["value"] == pytest.approx(0.05)
    assert row["interval"] == pytest.approx([0.05, 0.05]), "seeds are paired"
    assert rows["wd_0.2"]["arc/acc"]["value"] is None, "the baseline alone was evaluated"


def test_a_comparison_without_tasks_has_no_such_row(tmp_path):
    result = build_result(find_runs([write_ablation(tmp_path, three_arms())]))
    assert not [row for c in result["comparisons"] for row in c["metrics"] if "held-out task" in row["note"]]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"limit": null}', '{"limit": null, "task": "a", "step": 1, "metrics": 3}']
)
def test_a_broken_file_is_said(tmp_path, text):
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "arc-step1.json").write_text(text)
    with pytest.raises(ConfigError, match=r"arc-step1\.json: no result of evaluate\.py"):
        read_evaluations(tmp_path)
