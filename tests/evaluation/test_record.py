import json

import pytest

from ablation.held_out import read_evaluations
from config.errors import ConfigError
from evaluation.record import add_result, add_to_tensorboard, check_free, result_path

RESULT = {"metrics": {"acc": {"value": 0.25, "stderr": 0.1, "higher_is_better": True}}, "samples": 8}


def test_a_result_is_written_once(tmp_path):
    path = add_result(tmp_path, "arc", 40, None, RESULT)
    assert path == tmp_path / "evaluations" / "arc-step40.json"
    record = json.loads(path.read_text())
    assert record | RESULT == record and (record["task"], record["step"], record["limit"]) == ("arc", 40, None)
    written = path.read_bytes()
    check_free(tmp_path, ["arc"], 20, None)
    check_free(tmp_path, ["other"], 40, None)
    with pytest.raises(ConfigError, match=r"arc-step40\.json: this was evaluated before"):
        check_free(tmp_path, ["other", "arc"], 40, None)
    with pytest.raises(ConfigError, match="evaluated before"):
        add_result(tmp_path, "arc", 40, None, {"metrics": {}})
    assert path.read_bytes() == written
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing else is left"


def test_a_trial_has_a_file_of_its_own(tmp_path):
    add_result(tmp_path, "arc", 40, 5, RESULT)
    check_free(tmp_path, ["arc"], 40, None)
    assert read_evaluations(tmp_path) == {}, "no comparison reads a trial"


def test_names_that_are_no_file_names(tmp_path):
    assert result_path(tmp_path, "a/../b c", 1, None).name == "a_.._b_c-step1.json"


def test_a_comparison_reads_what_is_written(tmp_path):
    for step, value in ((40, 0.5), (20, 0.25), (100, 0.75)):
        add_result(tmp_path, "arc", step, None, {"metrics": {"acc": {"value": value}, "acc_norm": {"value": 1.0}}})
    assert read_evaluations(tmp_path)["eval/arc/acc"] == [(20, 0.25), (40, 0.5), (100, 0.75)]
    assert list(read_evaluations(tmp_path)) == ["eval/arc/acc", "eval/arc/acc_norm"]


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for step in (20, 40):
        add_to_tensorboard(tmp_path / "tb", "arc", step, RESULT["metrics"])
    events = accumulator.EventAccumulator(str(tmp_path / "tb" / "evaluations"))
    events.Reload()
    assert [event.step for event in events.Tensors("eval/arc/acc")] == [20, 40]
