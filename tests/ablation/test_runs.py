"""Run directories are read as the trainer writes them, and refused by name where they are broken."""

from __future__ import annotations

import json

import pytest

from ablation.evidence import curves, run_row
from ablation.measures import (
    median_step,
    seconds_to_reach,
    throughput,
    training_seconds,
    value_at_seconds,
    value_at_tokens,
)
from ablation.run_files import left_nothing
from ablation.runs import (
    VALIDATION_LOSS,
    config_difference,
    derived_difference,
    find_runs,
    latest_question,
    read_run,
)
from config.errors import ConfigError
from tests.ablation.synthetic import QUESTION, Arm, Noise, three_arms, write_ablation, write_run

STILL = Noise(seed=0.0, arm=0.0, speed=0.0, step=0.0)


def test_a_run_is_read(tmp_path):
    path = write_run(
        tmp_path / "seed3-2gpu-repeat1",
        name="q",
        arm="a",
        seed=3,
        gpus=2,
        repeat=1,
        question=QUESTION,
        tune={"optimizer.lr": 1e-3},
    )
    run = read_run(path)
    assert (run.ablation, run.arm, run.seed, run.world_size, run.repeat) == ("q", "a", "3", 2, 1)
    assert run.tune == {"optimizer.lr": 1e-3} and run.question["baseline"] == "wd_0.1"
    assert run.state == "DONE" and run.finish["steps"] == 60
    assert run.config["training.seq_len"] == 128 and run.tokens_per_step == 2048
    assert run.series(VALIDATION_LOSS)[0][0] == 0 and run.series(VALIDATION_LOSS)[-1][0] == 60
    assert len(run.step_times) == 60 and run.excluded_steps == {1, 2, 3, 10, 20, 30, 40, 50, 60}
    assert len(run.steady_times) == 51


@pytest.mark.parametrize(("state", "expected"), [("DONE", "DONE"), ("FAILED", "FAILED"), ("", "unfinished")])
def test_states(tmp_path, state, expected):
    assert read_run(write_run(tmp_path / "r", state=state)).state == expected


def test_done_and_different_seeds_are_told_apart(tmp_path):
    run = read_run(write_run(tmp_path / "r", record={"seeds": {"init_seed": 3, "data_seed": 5}}))
    assert run.seed == "data 5 init 3"


def test_throughput_comes_from_step_times_that_count(tmp_path):
    run = read_run(write_run(tmp_path / "r", noise=STILL, gpus=2))
    assert median_step(run) == pytest.approx(0.05)  # compilation (7.5 s) and validation (0.4 s) are left out
    assert throughput(run) == pytest.approx(2048 / 0.05 / 2)
    seconds = training_seconds(run)
    assert seconds[0] == 0 and seconds[60] == pytest.approx(60 * 0.05)


def test_padding_takes_time_and_is_no_token(tmp_path):
    def half_empty(line):
        line["data/fill_rate"] = 0.4 if line["step"] <= 30 else 0.6

    run = read_run(write_run(tmp_path / "r", noise=STILL, change_line=half_empty))
    assert run.fill_rate == pytest.approx(0.5)
    assert throughput(run) == pytest.approx(0.5 * 2048 / 0.1)
    rates = curves(run, VALIDATION_LOSS)["rate"]["values"]
    assert rates[1] == pytest.approx(0.4 * 2048 / 0.1) and rates[-1] == pytest.approx(0.6 * 2048 / 0.1)


def test_values_at_tokens_and_at_seconds(tmp_path):
    run = read_run(write_run(tmp_path / "r", noise=STILL))
    curve = dict(run.series(VALIDATION_LOSS))
    assert value_at_tokens(run, VALIDATION_LOSS, 20 * 2048) == curve[20]
    assert value_at_tokens(run, VALIDATION_LOSS, 25 * 2048) == pytest.approx((curve[20] + curve[30]) / 2)
    assert value_at_tokens(run, VALIDATION_LOSS, 61 * 2048) is None
    assert value_at_seconds(run, VALIDATION_LOSS, 2.5) == pytest.approx((curve[20] + curve[30]) / 2)
    assert seconds_to_reach(run, VALIDATION_LOSS, (curve[20] + curve[30]) / 2) == pytest.approx(2.5)
    assert seconds_to_reach(run, VALIDATION_LOSS, curve[60] - 0.1) is None


def test_a_step_logged_twice_counts_once_and_a_torn_last_line_is_dropped(tmp_path):
    path = write_run(tmp_path / "r")
    before = read_run(path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(before.lines[-1] | {"grad_norm": 123.0}) + "\n")
        file.write('{"step": 65, "tok')
    after = read_run(path)
    assert len(after.lines) == len(before.lines) and after.lines[-1]["grad_norm"] == 123.0
    assert after.steady_times == before.steady_times


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = write_run(tmp_path / "r")
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([lines[0], "{oops", *lines[1:]]) + "\n")
    with pytest.raises(ConfigError, match=r"metrics.jsonl, line 2"):
        read_run(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "{", "run.json: not valid JSON"),
        ("run.json", "{}", "tokens_per_step, seeds, world_size missing"),
        ("run.json", "[]", "an object was expected"),
        ("config.toml", "a = ", "config.toml"),
    ],
)
def test_broken_files_are_named(tmp_path, name, text, message):
    path = write_run(tmp_path / "r")
    (path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(path)


def test_find_runs_takes_folders_and_runs_once_and_skips_attempts(tmp_path):
    folder = write_ablation(tmp_path, three_arms())
    first = folder / "wd_0.1" / "seed1-1gpu"
    write_run(first / "attempts" / "1", name="weight_decay", arm="wd_0.1")
    runs = find_runs([folder, first])
    assert len(runs) == 15  # 3 arms x 3 seeds, 3 disjoint A/A seeds, 3 repeats
    assert next(run for run in runs if run.path == first).attempts == 1
    with pytest.raises(ConfigError, match="no run directory"):
        find_runs([first / "attempts" / "1" / "tb"] if (first / "attempts" / "1" / "tb").mkdir() is None else [])
    with pytest.raises(ConfigError, match="no such directory"):
        find_runs([tmp_path / "nowhere"])


def test_plain_runs_become_arms_by_configuration(tmp_path):
    faster = Arm({"optimizer.lr": 2e-3})
    for seed in (1, 2):
        write_run(tmp_path / f"base-{seed}", seed=seed)
        write_run(tmp_path / f"lr-{seed}", seed=seed, truth=faster)
    write_run(tmp_path / "again", seed=1)
    runs = find_runs([tmp_path])
    arms: dict[str, list[str]] = {}
    for run in runs:
        arms.setdefault(run.arm, []).append(run.seed)
    assert sorted(map(sorted, arms.values())) == [["1", "1", "2"], ["1", "2"]]
    assert sorted(run.repeat for run in runs) == [0, 0, 0, 0, 1]


def test_differences_leave_out_seeds_and_names(tmp_path):
    a = read_run(write_run(tmp_path / "a", seed=1, truth=Arm({"job.run_dir": "a", "job.description": "one"})))
    b = read_run(
        write_run(
            tmp_path / "b", seed=2, gpus=2, truth=Arm({"job.run_dir": "b", "optimizer.lr": 1e-3, "model.dim": 64})
        )
    )
    assert config_difference(a, b) == {"model.dim": (None, 64), "optimizer.lr": (8e-4, 1e-3)}
    moved = derived_difference(a, b)
    assert moved["derived.gradient_accumulation_steps"] == (2, 1) and moved["world_size"] == (1, 2)


def test_a_run_continued_from_a_checkpoint_is_read_over_its_attempts(tmp_path):
    path = write_run(tmp_path / "r")
    whole = read_run(path)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    # Killed after step 35, continued from a checkpoint at step 20: steps 25 to 35 ran twice, and count once.
    (path / "attempts" / "1").mkdir(parents=True)
    lost = [json.dumps(json.loads(line) | {"grad_norm": 99.0}) for line in lines[steps.index(25) : steps.index(35) + 1]]
    (path / "attempts" / "1" / "metrics.jsonl").write_text("\n".join([*lines[: steps.index(25)], *lost]) + "\n")
    (path / "metrics.jsonl").write_text("\n".join(lines[steps.index(25) :]) + "\n")
    run = read_run(path)
    assert run.lines == whole.lines and run.steady_times == whole.steady_times and run.attempts == 1
    assert run_row(run, "a", VALIDATION_LOSS, 60 * 2048)["attempts"] == 2
    # Killed again after step 25: what the first attempt made of steps 30 and 35 is no longer this run's.
    (path / "metrics.jsonl").write_text(lines[steps.index(25)] + "\n")
    assert [line["step"] for line in read_run(path).lines] == [0, 5, 10, 15, 20, 25]


def test_attempts_are_read_in_the_order_of_their_numbers(tmp_path):
    path = write_run(tmp_path / "r")
    for number, norm in ((2, 2.0), (9, 9.0), (10, 10.0)):
        (path / "attempts" / str(number)).mkdir(parents=True)
        text = json.dumps({"step": 5, "grad_norm": norm}) + "\n"
        (path / "attempts" / str(number) / "metrics.jsonl").write_text(text)
    (path / "metrics.jsonl").write_text("")
    assert read_run(path).series("grad_norm") == [(5, 10.0)]


def test_the_question_is_that_of_the_run_that_started_last(tmp_path):
    for order, seeds in ((7, [1, 2, 3]), (3, [1, 2])):
        write_run(tmp_path / str(order), name="q", arm="a", order=order, question=QUESTION | {"seeds": seeds})
    assert latest_question(find_runs([tmp_path]))["seeds"] == [1, 2, 3]


def test_a_run_that_left_no_directory_is_known_by_its_log(tmp_path):
    path = write_run(tmp_path / "q" / "a" / "seed1-1gpu", name="q", arm="a")
    (tmp_path / "q" / "b").mkdir()
    for log in (path.with_name("seed1-1gpu.log"), tmp_path / "q" / "b" / "seed1-1gpu-repeat2.log"):
        log.write_text("model.dim = 3: is odd\n")
    (tmp_path / "q" / "b" / "seed1-1gpu-repeat2").mkdir()  # killed before its record was written
    assert left_nothing([tmp_path, tmp_path / "q"]) == [tmp_path / "q" / "b" / "seed1-1gpu-repeat2.log"]
