"""Numbers of a report beside the same numbers from metrics.jsonl, by arithmetic that shares no code with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ablation.result import Rule, build_result
from ablation.runs import find_runs
from tests.ablation.synthetic import Arm, write_ablation, write_run

STEP, TOKENS = 40, 2048
T_95, T_975 = 4.302653, 6.205347  # two-sided Student t of 2 degrees of freedom, from a table
ARMS = {
    "wd_0.1": Arm({"optimizer.weight_decay": 0.1}),
    "better": Arm({"optimizer.weight_decay": 0.01}, loss=-0.1, speed=0.9),
    "quick": Arm({"optimizer.weight_decay": 0.2}, loss=0.001, speed=1.2),
}


def tell_lines_apart(line: dict[str, Any]) -> None:
    """Another value on every line; the first line holds warm-up alone."""
    step = line["step"]
    if step:
        line |= {"mfu(%)": float(step), "tflops": 2.0 * step, "memory/max_active(GiB)": 11.0 + (step == 30)}
    if step == 5:
        line["excluded_steps"] = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    question = {"decide": {"metric": "validation_metrics/loss", "step": STEP}}
    root = tmp_path_factory.mktemp("runs")
    return write_ablation(root, ARMS, question=question, gpus=2, change_line=tell_lines_apart)


@pytest.fixture(scope="module")
def arms(folder) -> dict[str, dict[str, Any]]:
    return {c["arm"]: c for c in build_result(find_runs([folder]))["comparisons"]}


class ByHand:
    """One run."""

    def __init__(self, path: Path) -> None:
        self.lines = [json.loads(text) for text in (path / "metrics.jsonl").read_text().splitlines()]
        self.times = [t for line in self.lines for t in line.get("step_times_s", [])]
        self.left_out = {s for line in self.lines for s in line.get("excluded_steps", [])}
        steady = sorted(t for step, t in enumerate(self.times, 1) if step not in self.left_out)
        half = len(steady) // 2
        self.median = steady[half] if len(steady) % 2 else (steady[half - 1] + steady[half]) / 2
        self.clock = [0.0]
        for step, t in enumerate(self.times, 1):
            self.clock.append(self.clock[-1] + (self.median if step in self.left_out else t))
        self.held_out = {x["step"]: x["validation_metrics/loss"] for x in self.lines if x["step"] % 10 == 0}

    def loss_after(self, seconds: float) -> float:
        """On the straight line between two evaluations."""
        steps = sorted(self.held_out)
        for a, b in zip(steps, steps[1:], strict=False):
            if self.clock[a] <= seconds <= self.clock[b]:
                share = (seconds - self.clock[a]) / (self.clock[b] - self.clock[a])
                return self.held_out[a] + share * (self.held_out[b] - self.held_out[a])
        raise AssertionError("the run was over by then")

    def seconds_to(self, loss: float) -> float | None:
        steps = sorted(self.held_out)
        for a, b in zip(steps, steps[1:], strict=False):
            if self.held_out[b] <= loss:
                share = (self.held_out[a] - loss) / (self.held_out[a] - self.held_out[b])
                return self.clock[a] + share * (self.clock[b] - self.clock[a])
        return None


@pytest.fixture(scope="module")
def hand(folder) -> dict[str, list[ByHand]]:
    return {arm: [ByHand(folder / arm / f"seed{seed}-2gpu") for seed in (1, 2, 3)] for arm in ARMS}


def interval(values: list[float], t: float) -> list[float]:
    mean = sum(values) / len(values)
    sd = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return [mean - t * sd / math.sqrt(len(values)), mean + t * sd / math.sqrt(len(values))]


def near(value: Any) -> Any:
    return pytest.approx(value, rel=1e-5)


def row(comparison: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in comparison["metrics"] if row["name"] == name)


@pytest.mark.parametrize("arm", ["better", "quick"])
def test_the_verdict_of_two_arms_rests_on_the_interval_of_their_holm_level(arms, hand, arm):
    """Of two arms Holm looks at the clearer one at 97.5 %, and at the other at 95 % if that one is clear."""
    loss = [c.held_out[STEP] - b.held_out[STEP] for b, c in zip(hand["wd_0.1"], hand[arm], strict=True)]
    logs = [math.log(b.median / c.median) for b, c in zip(hand["wd_0.1"], hand[arm], strict=True)]
    part, speed = arms[arm]["loss"], arms[arm]["speed"]
    assert part["value"] == near(sum(loss) / 3) and speed["value"] == near(math.exp(sum(logs) / 3))
    assert part["interval_95"] == near(interval(loss, T_95))
    assert speed["interval_95"] == near([math.exp(x) for x in interval(logs, T_95)])
    for table, values, show in ((part, loss, float), (speed, logs, math.exp)):
        t = T_975 if table["confidence"] == pytest.approx(0.975) else T_95
        assert table["interval"] == near([show(x) for x in interval(values, t)])
    assert sorted(arms[a]["loss"]["confidence"] for a in ("better", "quick")) == near([0.95, 0.975])


def test_rows_of_the_paired_table(arms, hand):
    comparison, runs = arms["better"], hand["better"]
    rates = [TOKENS / run.median / 2 for run in runs]
    expected = {
        "tokens/s/device": sum(rates) / 3,
        "device time a million tokens": sum(1e6 / rate for rate in rates) / 3,
        "step time p50": sum(run.median for run in runs) / 3,
        "MFU": 35.0,  # the median of 10, 15, .. 60: the line of the warm-up does not count
        "TFLOP/s": 70.0,
        "peak active memory": 12.0,
        "compile and warm-up": sum(sum(max(0.0, t - run.median) for t in run.times[:5]) for run in runs) / 3,
        "device-hours": sum(run.clock[STEP] * 2 / 3600 for run in runs) / 3,
        "final training loss": sum(  # two of eight log lines: the last quarter
            sum([x["loss_metrics/global_avg_loss"] for x in run.lines if 0 < x["step"] <= STEP][-2:]) / 2
            for run in runs
        ) / 3,
    }  # fmt: skip
    assert {name: row(comparison, name)["candidate"]["mean"] for name in expected} == near(expected)
    deviations = [rate - sum(rates) / 3 for rate in rates]
    assert row(comparison, "tokens/s/device")["candidate"]["sd"] == near(math.sqrt(sum(d * d for d in deviations) / 2))


@pytest.mark.parametrize("arm", ["better", "quick"])
def test_loss_at_equal_time_and_cost_of_the_baselines_loss(arms, hand, arm):
    differences, costs = [], []
    for base, run in zip(hand["wd_0.1"], hand[arm], strict=True):
        limit = min(base.clock[STEP], run.clock[STEP])
        differences.append(run.loss_after(limit) - base.loss_after(limit))
        costs.append(run.seconds_to(base.held_out[STEP] * (1 + 1e-5)))
    assert arms[arm]["equal_time"]["value"] == near(sum(differences) / 3)
    assert arms[arm]["equal_time"]["interval"] == near(interval(differences, T_95))
    reached = [c for c in costs if c is not None]
    assert arms[arm]["cost"]["reached"] == len(reached)
    if len(reached) < 3:
        assert arms[arm]["cost"]["value"] is None, "a mean over those that got there would hide those that did not"
    else:
        logs = [math.log(c / base.clock[STEP]) for c, base in zip(reached, hand["wd_0.1"], strict=True)]
        assert arms[arm]["cost"]["value"] == near(math.exp(sum(logs) / 3))


def test_a_seed_that_does_not_reach_the_baselines_loss_takes_the_ratio_away(tmp_path):
    worse = {"wd_0.1": Arm(), "mixed": Arm({"optimizer.weight_decay": 0.2}, loss=0.001)}
    folder = write_ablation(tmp_path, worse, question={"aa": False, "seeds": [1, 2, 3, 4, 5]})
    hand = {a: [ByHand(folder / a / f"seed{s}-1gpu") for s in (1, 2, 3, 4, 5)] for a in worse}
    reached = [
        c.seconds_to(b.held_out[60] * (1 + 1e-5)) is not None
        for b, c in zip(hand["wd_0.1"], hand["mixed"], strict=True)
    ]
    assert 0 < sum(reached) < 5, "the runs were made so"
    (comparison,) = build_result(find_runs([folder]))["comparisons"]
    assert (comparison["cost"]["reached"], comparison["cost"]["value"]) == (sum(reached), None)


def test_device_hours_count_the_devices_of_each_side(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"one-{seed}", seed=seed, order=2 * seed)
        write_run(tmp_path / f"two-{seed}", seed=seed, gpus=2, order=2 * seed + 1, truth=Arm(loss=-0.01))
    (comparison,) = build_result(find_runs([tmp_path]), rule=Rule(step=60))["comparisons"]
    base, two = ([ByHand(tmp_path / f"{name}-{seed}") for seed in (1, 2)] for name in ("one", "two"))
    needed = [run.seconds_to(b.held_out[60] * (1 + 1e-5)) * 2 / 3600 for b, run in zip(base, two, strict=True)]
    assert comparison["cost"]["baseline"]["mean"] == near(sum(run.clock[60] / 3600 for run in base) / 2)
    assert comparison["cost"]["candidate"]["mean"] == near(sum(needed) / 2)
    assert comparison["speed"]["value"] == near(
        math.exp(sum(math.log(b.median / 2 / c.median) for b, c in zip(base, two, strict=True)) / 2)
    )


def test_what_is_not_paired_is_not_paired_in_the_table_either(tmp_path):
    """One side ran after the other: rates are not paired, losses are."""
    for seed in (1, 2, 3):
        write_run(tmp_path / f"base-{seed}", seed=seed, order=seed)
        write_run(tmp_path / f"later-{seed}", seed=seed, order=100 + seed, truth=Arm({"optimizer.lr": 1e-3}))
    (comparison,) = build_result(find_runs([tmp_path]))["comparisons"]
    assert comparison["loss"]["paired"] and not comparison["speed"]["paired"]
    runs = [[ByHand(tmp_path / f"{name}-{seed}") for seed in (1, 2, 3)] for name in ("base", "later")]
    loss = [c.held_out[60] - b.held_out[60] for b, c in zip(*runs, strict=True)]
    assert row(comparison, "validation loss")["interval"] == near(interval(loss, T_95))
    logs = [[math.log(run.median) for run in side] for side in runs]
    variances = [sum((x - sum(v) / 3) ** 2 for x in v) / 2 / 3 for v in logs]
    t = 2.776445  # equal sizes: between 2 and 4 degrees of freedom, 4 for equal variances
    narrowest = 2 * t * math.sqrt(sum(variances))
    low, high = row(comparison, "step time p50")["interval"]
    assert math.log(high / low) >= narrowest * (1 - 1e-6)
    assert math.log(high / low) <= narrowest * T_95 / t * (1 + 1e-6)
    assert row(comparison, "step time p50")["interval"] != near([math.exp(x) for x in interval(
        [c - b for b, c in zip(*logs, strict=True)], T_95)])  # fmt: skip
