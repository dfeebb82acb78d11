"""train.py on the MoE debug configuration, as its user runs it."""

import json
from pathlib import Path

import pytest

from tests.test_train import launch, lines

MOE = ["--job.config_file", "train_configs/debug_moe.toml"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "moe"
    done = launch(run_dir, *MOE, "--training.steps", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


def test_at_most_ten_moe_scalars_and_all_of_them_on_log_steps(run):
    logged = [line for line in lines(run) if "loss_metrics/global_avg_loss" in line]
    tags = {tag for line in logged for tag in line if tag.startswith("moe/")}
    assert tags == {
        "moe/max_violation", "moe/mean_violation", "moe/load_variation", "moe/effective_experts", "moe/dead_experts",
        "moe/aux_loss", "moe/z_loss", "moe/router_entropy", "moe/churn",
    }  # fmt: skip
    assert all("moe/max_violation" in line for line in logged) and "moe/churn" in logged[-1]
    assert logged[-1]["loss_metrics/global_avg_loss"] < logged[0]["loss_metrics/global_avg_loss"]


def test_every_assignment_of_a_logged_step_is_in_the_load_file(run):
    written = [json.loads(line) for line in (run / "moe_loads.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [1, 5, 10]
    for line in written:
        assert len(line["counts"]) == 4
        assert all(sum(layer) == 16 * 64 * 2 for layer in line["counts"]), "tokens of the global batch times top-k"


def test_the_record_counts_active_parameters(run):
    record = json.loads((run / "run.json").read_text())
    assert record["parameters"] == {"total": 3_609_728, "active": 1_840_256}
    assert record["seeds"]["noise_seed"] == 0


def test_two_ranks_route_as_one_process_does(run, tmp_path):
    done = launch(tmp_path / "two", *MOE, "--training.steps", "10", ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (
        [line for line in lines(folder) if "loss_metrics/global_avg_loss" in line] for folder in (run, tmp_path / "two")
    )
    # The first choice is the same to the token; rounding may flip single ones later.
    assert one[0]["moe/max_violation"] == pytest.approx(two[0]["moe/max_violation"])
    for a, b in zip(one, two, strict=True):
        assert a["loss_metrics/global_avg_loss"] == pytest.approx(b["loss_metrics/global_avg_loss"], abs=2e-3)
