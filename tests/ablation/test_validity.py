"""Every reason for which a comparison is INVALID or not paired: each is provoked, and nothing else is complained
about.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ablation.result import build_result
from ablation.runs import find_runs
from tests.ablation.synthetic import Arm, three_arms, write_ablation, write_run

SEED2 = ("wd_0.01", "seed2-1gpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    arms = three_arms()
    del arms["wd_0.2"]
    return write_ablation(tmp_path, arms)


def edit(folder: Path, name: str, change: dict[str, Any], run: tuple[str, str] = SEED2) -> None:
    path = folder / run[0] / run[1] / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def edit_lines(folder: Path, change: Any, run: tuple[str, str] = SEED2) -> None:
    path = folder / run[0] / run[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [line for line in lines if change(line) is not False]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_config(folder: Path, before: str, after: str, run: tuple[str, str] | None = SEED2) -> None:
    paths = [folder / run[0] / run[1]] if run else list((folder / "wd_0.01").iterdir())
    for path in paths:
        text = (path / "config.toml").read_text()
        assert before in text
        (path / "config.toml").write_text(text.replace(before, after))


def judged(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """The comparison, and the items that are not ok: name -> (status, reason)."""
    comparison = build_result(find_runs([folder]))["comparisons"][0]
    items = {item["name"]: (item["status"], item["reason"]) for item in comparison["validity"]}
    return comparison, {name: told for name, told in items.items() if told[0] != "ok"}


def expect(folder: Path, name: str, status: str, reason: str, *, loss: bool = True, speed: bool = True) -> None:
    """Exactly one item is broken, it says so, and it costs the verdicts it should."""
    comparison, broken = judged(folder)
    assert list(broken) == [name], broken
    assert broken[name][0] == status and reason in broken[name][1]
    for part, spoilt in (("loss", loss), ("speed", speed)):
        entry = comparison[part]
        if status == "INVALID":
            assert (entry["word"] == "INVALID") == spoilt
            assert bool(entry["invalid"]) == spoilt
        else:
            assert entry["word"] != "INVALID" and entry["paired"] != spoilt
    if status == "unpaired" and loss:
        assert comparison["tier"] == "unpaired"


def test_untouched_runs_are_valid(folder):
    comparison, broken = judged(folder)
    assert broken == {} and comparison["tier"] == "paired"
    assert comparison["loss"]["word"] == "better"


def test_an_undeclared_key(folder):
    edit_config(folder, "lr = 0.0008", "lr = 0.001", run=None)
    expect(folder, "one variable changed", "INVALID", "optimizer.lr changed too, and only optimizer.weight_decay")


def test_runs_of_one_arm_that_differ(folder):
    edit_config(folder, "lr = 0.0008", "lr = 0.001")
    expect(folder, "one variable changed", "INVALID", "runs of wd_0.01 differ among themselves in optimizer.lr")


def test_an_arm_equal_to_the_baseline(folder):
    edit_config(folder, "weight_decay = 0.01", "weight_decay = 0.1", run=None)
    expect(folder, "one variable changed", "INVALID", "configured exactly like the baseline")


def test_companions_may_follow_and_inert_keys_do_not_count(tmp_path):
    arms = {"wd_0.1": Arm(), "sgd": Arm({"optimizer.name": "SGD", "optimizer.beta1": 0.5, "validation.steps": 4})}
    arms["wd_0.1"].config["validation.steps"] = 4
    comparison, broken = judged(write_ablation(tmp_path, arms, question={"variable": "optimizer.name"}))
    assert broken == {}
    assert list(comparison["variable"]) == ["optimizer.name"] and list(comparison["followers"]) == ["optimizer.beta1"]
    arms = {"wd_0.1": Arm(), "inert": Arm({"optimizer.weight_decay": 0.2, "compile.backend": "eager"})}
    assert judged(write_ablation(tmp_path / "inert", arms))[1] == {}


def test_a_held_quantity_that_moves(tmp_path):
    question = {"variable": "training.seq_len", "hold": {"training.global_batch_size": "tokens_per_step"}}
    arms = {"wd_0.1": Arm(), "long": Arm({"training.seq_len": 256, "training.global_batch_size": 8})}
    comparison, broken = judged(write_ablation(tmp_path, arms, question=question))
    assert list(broken) == ["same held-out windows"] and list(comparison["followers"]) == ["training.global_batch_size"]
    arms["long"].config["training.global_batch_size"] = 12
    _, broken = judged(write_ablation(tmp_path / "moved", arms, question=question))
    assert "should hold tokens_per_step, and it went 2048 -> 3072" in broken["one variable changed"][1]


def test_another_corpus(folder):
    edit(folder, "run.json", {"corpus_hash": "d00d" * 10})
    expect(folder, "same corpus", "INVALID", "d00dd00dd00d in wd_0.01/seed2-1gpu")


def test_a_corpus_that_no_run_recorded_is_not_known_to_be_the_same(folder):
    for path in folder.glob("*/seed*"):
        edit(folder, "run.json", {"corpus_hash": None}, (path.parent.name, path.name))
    assert judged(folder)[1] == {"same corpus": ("warning", "not recorded by every run")}


def test_another_tokenizer(folder):
    edit(folder, "run.json", {"tokenizer": {"kind": "bytes", "vocab_size": 258, "fingerprint": "b"}})
    expect(folder, "same tokenizer", "INVALID", "kind bytes, vocab_size 258")


def test_other_tokens_a_step(folder):
    """Tampered with consistently, in every file."""
    edit_config(folder, "global_batch_size = 16", "global_batch_size = 32", run=None)
    for seed in (1, 2, 3):
        run = ("wd_0.01", f"seed{seed}-1gpu")
        edit(folder, "run.json", {"tokens_per_step": 4096}, run)
        edit_lines(folder, lambda line: line.update(tokens=line["step"] * 4096), run)
    comparison, broken = judged(folder)
    assert broken["same tokens a step"][0] == "INVALID" and "4,096" in broken["same tokens a step"][1]
    assert broken["one variable changed"][0] == "INVALID" and comparison["loss"]["word"] == "INVALID"


def test_tokens_a_step_that_follow_the_variable_are_compared_at_equal_tokens(tmp_path):
    arms = {"wd_0.1": Arm(), "double": Arm({"training.global_batch_size": 32}, loss=-0.5)}
    result = build_result(
        find_runs([write_ablation(tmp_path, arms, question={"variable": "training.global_batch_size"})])
    )
    comparison = result["comparisons"][0]
    assert result["decision"]["tokens"] == 60 * 2048 and comparison["loss"]["word"] == "worse"
    items = {item["name"]: item for item in comparison["validity"]}
    assert items["same tokens a step"]["status"] == "ok" and "equal tokens" in items["same tokens a step"]["reason"]
    assert "decides at step 30 of 60" in items["decision after warm-up, window long enough"]["reason"]


def test_a_missing_seed(folder):
    (folder / "wd_0.01" / "seed2-1gpu" / "run.json").unlink()
    expect(folder, "same seeds on both sides", "INVALID", "2 only in wd_0.1")


def test_a_seed_missing_in_the_baseline(folder):
    (folder / "wd_0.1" / "seed2-1gpu" / "run.json").unlink()
    expect(folder, "same seeds on both sides", "INVALID", "2 only in wd_0.01")


def test_two_directories_of_one_question_hold_every_seed_twice(folder, tmp_path):
    """Only one of two runs of a seed can be its pair, and neither is better than the other."""
    again = {name: Arm(arm.config, loss=-0.5) for name, arm in three_arms().items() if name != "wd_0.2"}
    write_ablation(tmp_path / "again", again)
    (comparison,) = build_result(find_runs([folder, tmp_path / "again"]))["comparisons"]
    assert comparison["loss"]["word"] == comparison["speed"]["word"] == "INVALID"
    assert "seed 2 is 2 times in wd_0.01" in comparison["loss"]["invalid"][0]


def test_a_seed_missing_on_both_sides(folder):
    for arm in ("wd_0.01", "wd_0.1"):
        (folder / arm / "seed2-1gpu" / "run.json").unlink()
    expect(folder, "same seeds on both sides", "INVALID", "2 asked for and missing")


def test_no_seed_in_common(folder):
    for seed in (1, 2, 3):
        run = ("wd_0.01", f"seed{seed}-1gpu")
        edit(folder, "run.json", {"seeds": {"init_seed": 10 + seed, "data_seed": 10 + seed}}, run)
        edit_config(folder, f"seed = {seed}", f"seed = {10 + seed}", run)
    for path in (folder / "wd_0.1").iterdir():
        question = json.loads((path / "run.json").read_text())["ablation"]
        question["question"]["seeds"] = []
        edit(folder, "run.json", {"ablation": question}, ("wd_0.1", path.name))
    for path in (folder / "wd_0.01").iterdir():
        question = json.loads((path / "run.json").read_text())["ablation"]
        question["question"]["seeds"] = []
        edit(folder, "run.json", {"ablation": question}, ("wd_0.01", path.name))
    expect(folder, "same seeds on both sides", "unpaired", "baseline 1, 2, 3, 4, 5, 6; wd_0.01 11, 12, 13")


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        ({"hostname_hash": "elsewhere"}, "same host and device model", "hostname_hash 5b1f0c77aa12 and elsewhere"),
        ({"gpu_name": "Other GPU"}, "same host and device model", "gpu_name Example GPU and Other GPU"),
        ({"torch": "2.11.0"}, "same versions and environment variables", "torch 2.13.0 and 2.11.0"),
        ({"driver": "2.0"}, "same versions and environment variables", "driver 1.0 and 2.0"),
        ({"matmul_precision": "high"}, "same versions and environment variables", "matmul_precision highest and high"),
        ({"env": {"NCCL_ALGO": "Ring"}}, "same versions and environment variables", "NCCL_ALGO"),
        ({"git_commit": "b" * 40}, "same commit, clean tree", "aaaaaaaaaaaa and bbbbbbbbbbbb"),
        ({"git_dirty": True}, "same commit, clean tree", "uncommitted changes differ"),
    ],
)
def test_another_machine_or_code_is_not_paired(folder, change, name, reason):
    edit(folder, "environment.json", change)
    expect(folder, name, "unpaired", reason)


def test_other_uncommitted_changes(folder):
    for path in folder.glob("*/seed*"):
        edit(folder, "environment.json", {"git_dirty": True}, (path.parent.name, path.name))
        (path / "dirty.patch").write_text("+1")
    _, broken = judged(folder)
    assert (
        broken["same commit, clean tree"][0] == "warning"
        and "the same uncommitted changes" in broken["same commit, clean tree"][1]
    )
    (folder / SEED2[0] / SEED2[1] / "dirty.patch").write_text("+2")
    expect(folder, "same commit, clean tree", "unpaired", "uncommitted changes differ")


def test_a_failed_run(folder):
    path = folder / SEED2[0] / SEED2[1]
    (path / "DONE").rename(path / "FAILED")
    (path / "FAILED").write_text(json.dumps({"steps": 60, "reason": "lost a rank"}))
    expect(folder, "every run DONE", "INVALID", "seed2-1gpu FAILED: lost a rank")


def test_an_unfinished_run(folder):
    (folder / SEED2[0] / SEED2[1] / "DONE").unlink()
    expect(folder, "every run DONE", "INVALID", "unfinished")


def test_metrics_that_end_before_done_says(folder):
    edit(folder, "DONE", {"steps": 80})
    expect(folder, "every run DONE", "INVALID", "says 80 steps and logs 60")


@pytest.mark.parametrize("tag", ["loss_metrics/global_avg_loss", "grad_norm"])
def test_nan(folder, tag):
    edit_lines(folder, lambda line: line.update({tag: float("nan")}) if line["step"] == 30 else None)
    expect(folder, "no NaN, no skipped step", "INVALID", "not finite at step 30")


def test_nan_at_the_decision(folder):
    edit_lines(
        folder, lambda line: line.update({"validation_metrics/loss": float("nan")}) if line["step"] == 60 else None
    )
    comparison, broken = judged(folder)
    assert list(broken) == ["no NaN, no skipped step"]
    assert comparison["loss"]["word"] == "INVALID"
    json.dumps(comparison, allow_nan=False)


def test_skipped_steps(folder):
    edit(folder, "DONE", {"skipped_steps": 1})
    expect(folder, "no NaN, no skipped step", "INVALID", "skipped 1 steps")


@pytest.mark.parametrize(
    ("tag", "reason"),
    [("memory/num_alloc_retries", "3 allocation retries"), ("memory/num_ooms", "3 out-of-memory events")],
)
def test_memory_pressure_costs_the_speed_verdict_only(folder, tag, reason):
    edit_lines(folder, lambda line: line.update({tag: 3}) if line["step"] >= 40 else None)
    expect(folder, "no allocation retry, no OOM", "INVALID", reason, loss=False)


@pytest.mark.parametrize("day", ["2026-11-05", "2026-10-05"], ids=["after", "before"])
def test_order_that_was_not_interleaved_unpairs_speed_only(folder, day):
    for seed in (1, 2, 3):
        edit(folder, "run.json", {"started": f"{day}T0{seed}:00:00+00:00"}, ("wd_0.01", f"seed{seed}-1gpu"))
    expect(folder, "interleaved order", "unpaired", "one side ran after the other was over", loss=False)


def test_throttled_clocks(folder):
    edit(folder, "environment.json", {"clocks": {"sm_mhz": 900, "throttled": ["hw_thermal_slowdown"]}})
    expect(folder, "clocks not throttled", "INVALID", "seed2-1gpu: hw_thermal_slowdown", loss=False)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"throttled": ["sw_thermal_slowdown"]}, "seed2-1gpu: sw_thermal_slowdown"),
        ({"throttled": [], "throttled_total_s": {"sw_thermal_slowdown": 47.0}}, "sw_thermal_slowdown for 7 s"),
    ],
)
def test_clocks_throttled_during_the_run(folder, end, words):
    begin = {"sm_mhz": 1980, "throttled": [], "throttled_total_s": {"sw_thermal_slowdown": 40.0}}
    edit(folder, "environment.json", {"clocks": begin})
    edit(folder, "run.json", {"clocks_at_end": end})
    expect(folder, "clocks not throttled", "INVALID", words, loss=False)


def test_what_was_throttled_before_the_run_is_not_the_runs(folder):
    total = {"throttled_total_s": {"sw_thermal_slowdown": 40.0}}
    edit(folder, "environment.json", {"clocks": {"sm_mhz": 1980, "throttled": [], **total}})
    edit(folder, "run.json", {"clocks_at_end": {"throttled": [], **total}})
    assert judged(folder)[1] == {}


def test_other_limits_of_clock_or_power(folder):
    edit(folder, "environment.json", {"clocks": {"sm_mhz": 1980, "power_limit_w": 500.0}})
    edit(folder, "environment.json", {"clocks": {"sm_mhz": 1980, "power_limit_w": 700.0}}, ("wd_0.1", "seed1-1gpu"))
    expect(folder, "clocks not throttled", "INVALID", "power_limit_w 500.0, 700.0", loss=False)


@pytest.mark.parametrize("tag", ["mfu(%)", "mfu_causal(%)"])
def test_a_rate_above_the_peak_is_a_measuring_error(folder, tag):
    edit_lines(folder, lambda line: line.update({tag: 104.0}) if line["step"] == 35 else None)
    expect(folder, "rates below the device's peak", "INVALID", "MFU 104.0 % at step 35", loss=False)


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda f: edit(f, "run.json", {"seeds": {"init_seed": 2, "data_seed": 7}}), "data_seed 7 in run.json, 2"),
        (lambda f: edit_config(f, "global_batch_size = 16", "global_batch_size = 8", run=None), "2048 tokens a step"),
        (lambda f: edit_lines(f, lambda line: line.update(tokens=line["tokens"] // 2)), "tokens in metrics.jsonl"),
        (lambda f: edit_lines(f, lambda line: line.update(step_times_s=[-1.0] * 5)), "not positive"),
    ],
)
def test_records_that_contradict_each_other(folder, tamper, reason):
    tamper(folder)
    _, broken = judged(folder)
    assert broken["records agree with each other"][0] == "INVALID"
    assert reason in broken["records agree with each other"][1]


def test_a_run_copied_to_another_seed(folder):
    first, second = (folder / "wd_0.01" / f"seed{seed}-1gpu" / "metrics.jsonl" for seed in (1, 2))
    second.write_text(first.read_text())
    expect(folder, "records agree with each other", "INVALID", "same losses on different seeds: one is a copy")


def test_a_rule_changed_after_the_fact(folder):
    entry = json.loads((folder / SEED2[0] / SEED2[1] / "run.json").read_text())["ablation"]
    entry["question"]["decide"]["equivalent_within"] = 0.5
    edit(folder, "run.json", {"ablation": entry})
    expect(folder, "decision rule unchanged", "INVALID", "[ablation] decide differs between runs")


def test_seeds_added_to_the_question_later_change_no_rule(folder):
    for arm in ("wd_0.1", "wd_0.01"):
        entry = json.loads((folder / arm / "seed3-1gpu" / "run.json").read_text())["ablation"]
        entry["question"] |= {"question": "reworded", "hypothesis": ""}
        edit(folder, "run.json", {"ablation": entry}, (arm, "seed3-1gpu"))
    assert judged(folder)[1] == {}


def test_the_metric_is_missing_at_the_decision(folder):
    edit_lines(folder, lambda line: line.pop("validation_metrics/loss", None) and None if line["step"] == 60 else None)
    expect(
        folder, "metric present at the decision", "INVALID", "no validation_metrics/loss at 122,880 tokens", speed=False
    )


def test_no_step_that_counts(folder):
    edit_lines(folder, lambda line: line.update(excluded_steps=list(range(1, 61))))
    comparison, broken = judged(folder)
    assert broken["step times present"][0] == "INVALID"
    assert comparison["speed"]["word"] == "INVALID" and comparison["loss"]["word"] == "better"


def test_decision_in_warm_up_and_short_window_warn(tmp_path):
    arms = {"wd_0.1": Arm({"lr_scheduler.warmup_steps": 60, "training.steps": 60})}
    arms["wd_0.01"] = Arm(arms["wd_0.1"].config | {"optimizer.weight_decay": 0.01}, loss=-0.03)
    comparison, broken = judged(write_ablation(tmp_path, arms))
    assert broken["decision after warm-up, window long enough"][0] == "warning"
    assert "inside its 60 warm-up steps" in broken["decision after warm-up, window long enough"][1]
    assert comparison["loss"]["word"] == "better"
    short = {
        name: Arm(arm.config | {"training.steps": 20, "lr_scheduler.warmup_steps": 2}) for name, arm in arms.items()
    }
    folder = write_ablation(
        tmp_path / "short", short, question={"decide": {"metric": "validation_metrics/loss", "step": 20}}
    )
    assert "fewer than 20" in judged(folder)[1]["decision after warm-up, window long enough"][1]


def test_plain_runs_with_two_changed_keys(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"a{seed}", seed=seed, order=seed)
        truth = Arm({"optimizer.lr": 1e-3, "training.max_norm": 2.0})
        write_run(tmp_path / f"b{seed}", seed=seed, truth=truth, order=seed)
    _, broken = judged(tmp_path)
    assert broken["one variable changed"] == ("INVALID", "2 keys differ: optimizer.lr, training.max_norm")
