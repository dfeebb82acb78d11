"""The comparison as a whole: verdicts from run directories with planted effects, tiers, grids, references, the
console.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ablation.aa import noise_bands
from ablation.compare import main
from ablation.comparisons import PartData, difference
from ablation.measures import lower_is_better
from ablation.report_content import content
from ablation.report_markdown import render_markdown
from ablation.result import Rule, build_result
from ablation.runs import find_runs
from config.errors import ConfigError
from tests.ablation.synthetic import QUESTION, Arm, Noise, three_arms, write_ablation, write_run

ROOT = Path(__file__).resolve().parents[2]


def result_of(folder: Path, **options: Any) -> dict[str, Any]:
    result = build_result(find_runs([folder]), **options)
    json.dumps(result, allow_nan=False)
    return result


def by_arm(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {c["arm"]: c for c in result["comparisons"]}


def items(comparison: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {item["name"]: (item["status"], item["reason"]) for item in comparison["validity"]}


def test_planted_effects_come_out(tmp_path):
    arms = by_arm(result_of(write_ablation(tmp_path, three_arms(), noise=Noise(speed=0.001))))
    better, same = arms["wd_0.01"], arms["wd_0.2"]
    assert better["loss"]["word"] == "better" and better["loss"]["value"] == pytest.approx(-0.03, abs=0.004)
    assert better["speed"]["word"] == "worse" and better["speed"]["value"] == pytest.approx(0.97, abs=0.005)
    assert better["loss"]["phrase"] == "better, indicative" and better["loss"]["p_value"] is None
    assert same["loss"]["word"] == "equivalent" and same["loss"]["phrase"] == "equivalent within 0.005, indicative"
    memory = next(row for row in better["metrics"] if row["name"] == "peak active memory")
    assert memory["kind"] == "difference" and memory["value"] == pytest.approx(0.4)
    assert better["variable"] == {"optimizer.weight_decay": [0.1, 0.01]}
    assert better["equal_time"]["value"] > better["loss"]["value"]  # the slower arm has seen fewer tokens by then
    assert better["cost"]["reached"] == 3 and better["cost"]["value"] < 1


def test_differences_and_intervals_are_those_of_the_runs(tmp_path):
    """By hand from metrics.jsonl, without the code under test."""
    folder = write_ablation(tmp_path, three_arms())
    comparison = by_arm(result_of(folder))["wd_0.01"]
    losses, rates = {}, {}
    for arm in ("wd_0.1", "wd_0.01"):
        for seed in (1, 2, 3):
            lines = [
                json.loads(x) for x in (folder / arm / f"seed{seed}-1gpu" / "metrics.jsonl").read_text().splitlines()
            ]
            losses[arm, seed] = lines[-1]["validation_metrics/loss"]
            times = [t for line in lines for t in line.get("step_times_s", [])]
            steady = sorted(t for step, t in enumerate(times, 1) if step > 3 and step % 10)
            rates[arm, seed] = 2048 / steady[len(steady) // 2]
    differences = [losses["wd_0.01", s] - losses["wd_0.1", s] for s in (1, 2, 3)]
    mean = sum(differences) / 3
    half = 4.30265 / 3**0.5 * (sum((d - mean) ** 2 for d in differences) / 2) ** 0.5
    assert comparison["loss"]["value"] == pytest.approx(mean)
    assert comparison["loss"]["interval_95"] == pytest.approx([mean - half, mean + half], rel=1e-5)
    ratio = 1.0
    for seed in (1, 2, 3):
        ratio *= (rates["wd_0.01", seed] / rates["wd_0.1", seed]) ** (1 / 3)
    assert comparison["speed"]["value"] == pytest.approx(ratio)


@pytest.mark.parametrize("above, reached", [(1e-5, 3), (1e-3, 0)], ids=["rounding", "worse"])
def test_the_baseline_s_loss_is_reached_to_rounding(tmp_path, above, reached):
    arms = {"wd_0.1": Arm(), "wd_0.2": Arm({"optimizer.weight_decay": 0.2}, loss=above)}
    folder = write_ablation(tmp_path, arms, noise=Noise(arm=0.0, step=0.0), question={"aa": False})
    cost = by_arm(result_of(folder))["wd_0.2"]["cost"]
    assert (cost["reached"], cost["of"]) == (reached, 3)
    assert cost["value"] == pytest.approx(1, abs=0.02) if reached else cost["value"] is None


def test_padding_has_a_row_where_there_is_any(tmp_path):
    for order, (arm, rate) in enumerate((("split_fill", 1.0), ("padded", 0.75))):
        for seed in (1, 2):
            write_run(
                tmp_path / "runs" / f"{order}-{seed}", truth=Arm({"data.packing": arm}), seed=seed, order=order,
                change_line=lambda line, rate=rate: line.update({"data/fill_rate": rate}),
            )  # fmt: skip
    (padded,) = result_of(tmp_path / "runs")["comparisons"]
    row = next(row for row in padded["metrics"] if row["name"] == "fill rate")
    assert row["value"] == pytest.approx(-0.25)
    assert padded["speed"]["value"] == pytest.approx(0.75, rel=0.05)
    plain = by_arm(result_of(write_ablation(tmp_path / "plain", three_arms())))["wd_0.2"]
    assert "fill rate" not in [row["name"] for row in plain["metrics"]]


def test_bands_come_from_the_a_a_runs(tmp_path):
    result = result_of(write_ablation(tmp_path, three_arms()))
    loss, speed = result["aa"]["wd_0.1"]["loss"], result["aa"]["wd_0.1"]["speed"]
    assert loss["runs"] == 6 and loss["band"] == 2 * loss["spread"] and loss["against_itself"]["n"] == 3
    assert speed["runs"] == 6 and speed["repeat_loss_difference"] == 0.0
    assert result["decision"]["band"] == 0.005 and result["decision"]["band_source"] == "equivalent_within"
    undeclared = {"decide": {"metric": "validation_metrics/loss", "step": 60}}
    result = result_of(write_ablation(tmp_path / "undeclared", three_arms(), question=undeclared))
    assert result["decision"]["band"] == result["aa"]["wd_0.1"]["loss"]["band"]
    result = result_of(write_ablation(tmp_path / "none", three_arms(), question=undeclared | {"aa": False}))
    assert result["decision"]["band"] == 0.0 and result["decision"]["speed_band"] == 0.0
    assert all(c["loss"]["word"] != "equivalent" for c in result["comparisons"])


def test_one_seed_is_marked_everywhere_and_decides_nothing(tmp_path):
    result = result_of(write_ablation(tmp_path, three_arms(), question={"seeds": [1], "n1_ok": True}))
    for comparison in result["comparisons"]:
        for part in ("loss", "speed"):
            assert comparison[part]["word"] == "inconclusive" and comparison[part]["interval"] is None
            assert comparison[part]["phrase"].endswith("n = 1") and comparison[part]["needs"] >= 2


def test_six_seeds_have_holm_adjusted_p_values_and_are_not_indicative(tmp_path):
    result = result_of(write_ablation(tmp_path, three_arms(), question={"seeds": [1, 2, 3, 4, 5, 6]}))
    arms = by_arm(result)
    assert arms["wd_0.01"]["loss"]["p_value"] == 2 * 2 / 64  # exact, times two arms
    assert arms["wd_0.01"]["loss"]["phrase"] == "better"
    assert arms["wd_0.01"]["loss"]["confidence"] == pytest.approx(0.975)


def test_references_are_drawn_and_never_ranked(tmp_path):
    result = result_of(write_ablation(tmp_path, three_arms(), question={"references": ["wd_0.01"]}))
    reference = by_arm(result)["wd_0.01"]
    assert reference["role"] == "reference" and reference["loss"]["word"] == "reference"
    assert reference["loss"]["value"] is not None and reference["loss"]["interval"] is not None
    assert result["decision"]["family"] == 1 and result["comparisons"][-1]["arm"] == "wd_0.01"


def test_a_violated_expectation(tmp_path):
    arms = by_arm(result_of(write_ablation(tmp_path, three_arms(), question={"expected": "loss-neutral"})))
    assert arms["wd_0.01"]["expectation"] == "violated" and arms["wd_0.2"]["expectation"] == "held"


def test_only_a_a(tmp_path):
    folder = write_ablation(tmp_path, {"wd_0.1": Arm()}, name="aa", question={"variable": ""})
    result = result_of(folder)
    aa = result["aa"]["wd_0.1"]
    assert result["comparisons"] == [] and aa["loss"]["against_itself"]["n"] == 3
    speed = aa["speed"]["against_itself"]
    assert speed["n"] == 3 and speed["interval"][0] < 1 < speed["interval"][1]
    rates = {row["directory"]: row["tokens_per_second_device"] for row in result["runs"]}
    ratio = 1.0
    for seed in (1, 2, 3):
        place = f"{folder}/wd_0.1/seed{seed}-1gpu"
        ratio *= (rates[f"{place}-repeat1"] / rates[place]) ** (1 / 3)
    assert speed["ratio"] == pytest.approx(ratio)


def test_a_a_runs_have_a_validity_box_each(tmp_path):
    folder = write_ablation(tmp_path, three_arms())
    boxes = result_of(folder)["aa"]["wd_0.1"]["validity"]
    assert list(boxes) == ["the same seeds again", "disjoint seeds"]
    assert all(item["status"] == "ok" for box in boxes.values() for item in box)
    assert boxes["disjoint seeds"][0]["name"] == "nothing changed"
    for name, change in (("seed2-1gpu-repeat1", {"torch": "2.11.0"}), ("seed5-1gpu", {"gpu_name": "Other GPU"})):
        path = folder / "wd_0.1" / name / "environment.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (folder / "wd_0.1" / "seed4-1gpu" / "DONE").unlink()
    config = folder / "wd_0.1" / "seed6-1gpu" / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.0008", "lr = 0.001"))
    boxes = result_of(folder)["aa"]["wd_0.1"]["validity"]
    bad = {(box, item["name"]) for box, items in boxes.items() for item in items if item["status"] != "ok"}
    assert bad == {
        ("the same seeds again", "same versions and environment variables"),
        ("disjoint seeds", "same host and device model"),
        ("disjoint seeds", "every run DONE"),
        ("disjoint seeds", "nothing changed"),
    }


def noise_of(folder: Path, seeds: list[str]) -> dict[str, Any]:
    baseline = [run for run in find_runs([folder]) if run.arm == "wd_0.1"]
    return noise_bands(baseline, seeds, "validation_metrics/loss", 60 * 2048)


def test_noise_is_measured_on_runs_that_are_fit_and_alike(tmp_path):
    folder = write_ablation(tmp_path, {"wd_0.1": three_arms()["wd_0.1"]})
    assert noise_of(folder, ["1", "2", "3"])["loss"]["seeds"] == ["1", "2", "3", "4", "5", "6"]
    (folder / "wd_0.1" / "seed4-1gpu" / "DONE").rename(folder / "wd_0.1" / "seed4-1gpu" / "FAILED")
    for seed, name, change in ((5, "DONE", {"skipped_steps": 3}), (6, "run.json", {"corpus_hash": "other"})):
        path = folder / "wd_0.1" / f"seed{seed}-1gpu" / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert noise_of(folder, ["1", "2", "3"])["loss"]["seeds"] == ["1", "2", "3"]
    for seed, moved in ((2, 0.01), (3, 0.002)):
        path = folder / "wd_0.1" / f"seed{seed}-1gpu-repeat1" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[-1]["validation_metrics/loss"] += moved
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert noise_of(folder, ["1", "2", "3"])["speed"]["repeat_loss_difference"] == pytest.approx(0.01)


def test_over_device_counts_the_widest_band_holds_for_all(tmp_path):
    undeclared = {"decide": {"metric": "validation_metrics/loss", "step": 60}}
    for gpus, noise in ((1, Noise(speed=0.002)), (2, Noise(seed=0.05, speed=0.01)), (4, Noise(speed=0.001))):
        write_ablation(tmp_path, three_arms(), gpus=gpus, noise=noise, question=undeclared)
    result = result_of(tmp_path)
    loss, speed = ([aa[part] for aa in result["aa"].values()] for part in ("loss", "speed"))
    assert result["decision"]["band"] == max(part["band"] for part in loss) > min(part["band"] for part in loss)
    assert result["decision"]["speed_band"] == pytest.approx(max(part["band"] for part in speed))
    assert max(part["band"] for part in speed) < 0.05


def test_a_repeat_of_a_candidate_does_not_take_the_place_of_its_run(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"base-{seed}", seed=seed, order=seed)
        for again in (0, 1):
            truth = Arm({"optimizer.lr": 1e-3}, loss=1.0 * again)
            write_run(tmp_path / f"high-{seed}-{again}", seed=seed, order=seed, truth=truth)
    (comparison,) = result_of(tmp_path)["comparisons"]
    assert comparison["loss"]["n"] == 2 and comparison["loss"]["value"] == pytest.approx(0.0, abs=0.01)


def test_a_seed_that_was_run_counts_after_it_was_taken_out_of_the_question(tmp_path):
    folder = write_ablation(tmp_path, three_arms(), question={"aa": False})
    for path in folder.glob("*/*/run.json"):
        record = json.loads(path.read_text())
        record["ablation"]["question"]["seeds"] = [1, 2]
        path.write_text(json.dumps(record))
    for comparison in result_of(folder)["comparisons"]:
        assert comparison["loss"]["n"] == 3 and comparison["loss"]["word"] != "INVALID"


def test_differences_are_taken_by_seed_and_not_by_place():
    part = PartData({"1": 1.0, "2": 2.0}, {"2": 2.5, "1": 1.1}, [], [], ratio=False)
    assert part.differences == {"2": 0.5, "1": pytest.approx(0.1)}
    some = difference({"1": 1.0, "2": 2.0}, {"2": 2.5, "3": 9.0}, paired=True)
    assert (some.mean, some.n, some.paired) == (0.5, 1, True), "seed 2 alone is a pair"
    assert difference({"1": 1.0}, {"2": 2.0}, paired=True) is None


def test_more_is_better_of_rates_alone():
    names = ("throughput(tps)", "tflops", "mfu(%)", "tokens/s/device")
    assert not any(lower_is_better(name) for name in names)
    assert lower_is_better("validation_metrics/loss") and lower_is_better("grad_norm")


def test_a_noisy_machine_is_no_licence_for_equivalence(tmp_path):
    """Repeats that differ by half give no band of half in which everything is equivalent."""
    result = result_of(write_ablation(tmp_path, three_arms(), noise=Noise(speed=0.3)))
    assert result["decision"]["speed_noise"] > 0.3
    assert result["decision"]["speed_band"] == pytest.approx(0.05)
    assert {c["speed"]["word"] for c in result["comparisons"]} == {"inconclusive"}


def test_the_console_of_only_a_a_tells_the_noise(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ablation.report.draw_all", lambda result: {})
    folder = write_ablation(tmp_path, {"wd_0.1": Arm()}, name="aa", question={"variable": ""})
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "disjoint seeds, A against A" in out and "6 runs; loss identical" in out


def test_device_counts_are_compared_apart(tmp_path):
    folder = write_ablation(tmp_path, three_arms(), gpus=1)
    write_ablation(tmp_path, three_arms(), gpus=2)
    labels = [(c["arm"], c["baseline"], c["devices"]) for c in result_of(folder)["comparisons"]]
    assert ("wd_0.01 on 1", "wd_0.1 on 1", 1) in labels and ("wd_0.01 on 2", "wd_0.1 on 2", 2) in labels
    assert len(labels) == 4


def test_tuned_arms_meet_at_their_best_points(tmp_path):
    grid = {"optimizer.lr": [1e-4, 3e-4, 1e-3]}
    question = QUESTION | {"tune": grid, "aa": False, "seeds": [1, 2]}
    # Loss by arm and rate: the baseline is best in the middle, the candidate at the upper edge.
    losses = {"wd_0.1": [0.05, 0.0, 0.04], "wd_0.01": [0.05, 0.03, -0.02]}
    order = 0
    for seed in (1, 2):
        for arm, values in losses.items():
            for rate, loss in zip(grid["optimizer.lr"], values, strict=True):
                write_run(
                    tmp_path / "q" / arm / f"lr-{rate:g}" / f"seed{seed}-1gpu", name="q", arm=arm, seed=seed,
                    truth=Arm(three_arms()[arm].config, loss=loss), question=question, order=order,
                    tune={"optimizer.lr": rate},
                )  # fmt: skip
                order += 1
    # The A/A runs take the middle point: on the same seed again, and on a disjoint one.
    for seed, repeat in ((1, 2), (2, 2), (3, 0), (4, 0)):
        write_run(
            tmp_path / "q" / "wd_0.1" / "lr-0.0003" / f"seed{seed}-1gpu-repeat{repeat}", name="q",
            arm="wd_0.1", seed=seed, truth=Arm(three_arms()["wd_0.1"].config), question=question, order=order,
            repeat=repeat, tune={"optimizer.lr": 3e-4},
        )  # fmt: skip
    result = result_of(tmp_path / "q")
    assert result["aa"]["wd_0.1"]["loss"]["runs"] == 4 and result["aa"]["wd_0.1"]["speed"]["runs"] == 4
    comparison = by_arm(result)["wd_0.01"]
    assert comparison["loss"]["value"] == pytest.approx(-0.02, abs=0.006)
    edge = [item for item in comparison["validity"] if item["name"] == "tuned optimum inside the grid"]
    assert [item["status"] for item in edge] == ["ok", "warning"] and "0.001 is the largest tried" in edge[1]["reason"]
    assert [p["best"] for p in result["tune"]["wd_0.1"]] == [False, True, False]
    assert items(comparison)["one variable changed"][0] == "ok"
    # The choice rests on the compared seeds: the disjoint ones of the A/A runs, which only one point has, do not count.
    assert [p["n"] for p in result["tune"]["wd_0.1"]] == [2, 2, 2]
    (tmp_path / "q" / "wd_0.01" / "lr-0.0001" / "seed2-1gpu" / "run.json").unlink()
    broken = by_arm(result_of(tmp_path / "q"))["wd_0.01"]
    assert broken["loss"]["word"] == "INVALID" and "grid points have 1, 2 seeds" in " ".join(broken["loss"]["invalid"])
    (tmp_path / "q" / "wd_0.01" / "lr-0.0001" / "seed1-1gpu" / "run.json").unlink()
    broken = by_arm(result_of(tmp_path / "q"))["wd_0.01"]
    assert "wd_0.01: no run at optimizer.lr = 0.0001" in " ".join(broken["loss"]["invalid"])


def test_an_older_directory_is_bridged_over_the_baseline_and_its_drift_shown(tmp_path):
    arms = three_arms()
    older = write_ablation(
        tmp_path / "old", {"wd_0.1": arms["wd_0.1"], "wd_0.01": arms["wd_0.01"]}, environment={"torch": "2.11.0"}
    )
    drifted = {
        "wd_0.1": Arm(arms["wd_0.1"].config, loss=0.02, speed=1.1),
        "wd_0.2": Arm(arms["wd_0.2"].config, loss=0.02),
    }
    newer = write_ablation(tmp_path / "new", drifted, first_minute=10_000)
    result = build_result(find_runs([newer]), find_runs([older]))
    tiers = {c["arm"]: (c["tier"], c["baseline"]) for c in result["comparisons"]}
    assert tiers == {"wd_0.2": ("paired", "wd_0.1"), "wd_0.01 (older)": ("bridged", "wd_0.1 (older)")}
    assert by_arm(result)["wd_0.01 (older)"]["loss"]["value"] == pytest.approx(-0.03, abs=0.004)
    drift = result["drift"]["wd_0.1"]
    assert drift["loss"]["value"] == pytest.approx(0.02, abs=0.001)
    assert drift["speed"]["value"] == pytest.approx(1.1, abs=0.02)


def test_a_baseline_that_was_configured_otherwise_has_no_drift(tmp_path):
    """The difference would be that of the configurations."""
    arms = three_arms()
    changed = {"wd_0.1": Arm(arms["wd_0.1"].config | {"optimizer.lr": 1e-4, "metrics.log_freq": 10}, loss=1.0)}
    older, newer = write_ablation(tmp_path / "old", changed), write_ablation(tmp_path / "new", arms)
    result = build_result(find_runs([newer]), find_runs([older]))
    # A key that one side did not write has its default there: metrics.log_freq has not moved.
    assert result["drift"] == {"wd_0.1": {"loss": None, "speed": None, "moved": ["optimizer.lr"]}}
    text = render_markdown(content(result | {"directory": "new"}, set()))
    assert "not the same: optimizer.lr" in text
    for path in older.glob("*/*/run.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"corpus_hash": "another"}))
    result = build_result(find_runs([newer]), find_runs([older]))
    assert result["drift"]["wd_0.1"]["moved"] == ["optimizer.lr", "the corpus"]


def test_without_a_baseline_of_its_own_the_comparison_is_unpaired(tmp_path):
    arms = three_arms()
    older = write_ablation(tmp_path / "old", {"wd_0.1": arms["wd_0.1"]})
    newer = write_ablation(tmp_path / "new", {"wd_0.01": arms["wd_0.01"]}, question={"aa": False})
    result = build_result(find_runs([newer]), find_runs([older]))
    assert [c["tier"] for c in result["comparisons"]] == ["unpaired"]
    assert not result["comparisons"][0]["loss"]["paired"]
    with pytest.raises(ConfigError, match="no run of the baseline 'wd_0.1'"):
        build_result(find_runs([newer]))


def test_plain_runs(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path / f"base-{seed}", seed=seed, order=10 * seed)
        write_run(
            tmp_path / f"fast-{seed}", seed=seed, order=10 * seed + 1, truth=Arm({"optimizer.lr": 1e-3}, loss=-0.04)
        )
    result = result_of(tmp_path, rule=Rule("validation_metrics/loss", 50, 0.01))
    assert result["decision"]["step"] == 50 and result["decision"]["band"] == 0.01
    comparison = result["comparisons"][0]
    assert comparison["baseline"] == "base-1" and comparison["loss"]["word"] == "better"
    assert comparison["variable"] == {"optimizer.lr": [8e-4, 1e-3]}


def test_runs_of_two_ablations_are_refused(tmp_path):
    one = write_ablation(tmp_path, three_arms(), name="one")
    two = write_ablation(tmp_path, three_arms(), name="two")
    with pytest.raises(ConfigError, match=r"several ablations \(one, two\)"):
        build_result(find_runs([one, two]))


def test_the_console_and_exit_codes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ablation.report.draw_all", lambda result: {})
    folder = write_ablation(tmp_path, three_arms())
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert (
        "wd_0.01  better, indicative" in out
        and "report.html" in out
        and "Decided on validation_metrics/loss at step 60" in out
    )
    assert all(len(line) < 260 for line in out.splitlines())
    # An arm whose every run ended before it had a directory is nowhere but here.
    (folder / "wd_0.3").mkdir()
    (folder / "wd_0.3" / "seed1-1gpu.log").write_text("refused\n")
    assert main([str(folder)]) == 0
    told = "Started, and left no run directory: wd_0.3/seed1-1gpu.log. They are in no table."
    assert told in capsys.readouterr().out and told in (folder / "report" / "report.md").read_text()
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert main([str(folder), "--metric", "grad_norm"]) == 2
    assert "decided in weight_decay.toml, [ablation.decide]" in capsys.readouterr().err


def test_comparing_loads_no_torch(tmp_path):
    folder = write_ablation(tmp_path, {"wd_0.1": Arm()}, name="aa", question={"variable": ""})
    code = (
        "import sys; from pathlib import Path; from ablation.compare import main; from ablation.runs import find_runs; "
        "from ablation.result import build_result; build_result(find_runs([Path(sys.argv[1])])); "
        "print(sorted({'torch', 'numpy', 'matplotlib', 'tensorboard'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_factorial_tells_the_interaction_and_a_ladder_its_steps(tmp_path):
    both = {"optimizer.weight_decay": 0.01, "optimizer.eps": 1e-6}
    base = {"optimizer.weight_decay": 0.1, "optimizer.eps": 1e-8}
    arms = {
        "wd_0.1": Arm(base),
        "wd": Arm(base | {"optimizer.weight_decay": 0.01}, loss=-0.03, speed=0.98),
        "eps": Arm(base | {"optimizer.eps": 1e-6}, loss=-0.02, speed=0.99),
        "wd+eps": Arm(both, loss=-0.09, speed=0.98 * 0.99 * 0.95),
    }
    question = {"variable": ["optimizer.weight_decay", "optimizer.eps"], "design": "factorial", "aa": False}
    quiet = Noise(arm=0.001, speed=0.001)
    folder = write_ablation(tmp_path, arms, name="f", question=question, noise=quiet)
    (entry,) = result_of(folder)["contrasts"]
    assert (entry["arm"], entry["kind"]) == ("wd+eps", "beyond wd and eps together")
    assert entry["loss"]["value"] == pytest.approx(-0.04, abs=0.004) and entry["loss"]["n"] == 3
    assert entry["loss"]["interval"][0] < -0.04 < entry["loss"]["interval"][1]
    assert entry["speed"]["value"] == pytest.approx(0.95, abs=0.005)
    del arms["eps"]
    ladder = result_of(write_ablation(tmp_path, arms, name="l", question=question | {"design": "ladder"}, noise=quiet))
    (entry,) = ladder["contrasts"]
    assert entry["kind"] == "against wd" and entry["loss"]["value"] == pytest.approx(-0.06, abs=0.004)
    (folder / "wd" / "seed2-1gpu" / "DONE").unlink()
    assert result_of(folder)["contrasts"][0]["loss"] is None
    rungs = {"wd_0.1": Arm(base)}
    for name, key, loss in (("a", "weight_decay", -0.03), ("a+b", "eps", -0.05), ("a+b+c", "lr", -0.06)):
        config = list(rungs.values())[-1].config | {f"optimizer.{key}": 0.001}
        rungs[name] = Arm(config, loss=loss)
    declared = {"variable": ["optimizer.weight_decay", "optimizer.eps", "optimizer.lr"], "design": "ladder"}
    steps = result_of(write_ablation(tmp_path, rungs, name="m", question=question | declared, noise=quiet))["contrasts"]
    assert [entry["kind"] for entry in steps] == ["against a", "against a+b"]
    assert [entry["loss"]["value"] for entry in steps] == pytest.approx([-0.02, -0.01], abs=0.004)
    text = render_markdown(content(ladder | {"directory": "l"}, set()))
    assert "Steps of the ladder" in text and "| wd+eps | against wd |" in text
