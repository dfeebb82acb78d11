"""Which runs a question becomes, in which order, where and how; and which folders they may go into."""

from __future__ import annotations

from pathlib import Path

import pytest

from ablation.guard import guard
from ablation.plan import Plan, check_files, check_folder, check_processes, folder_for, folders, plan
from ablation.question import read
from config.errors import ConfigError
from config.load import load_file, to_toml


def planned(path: Path, gpus: int = 1, overrides: tuple[str, ...] = (), **leaves) -> Plan:
    return plan(guard(read(path), leaves, gpus).accepted(), gpus, overrides)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def keep(chosen: Plan, folder: Path) -> None:
    """Leave what train.py would of every run."""
    for run in chosen.runs:
        directory = folder / run.place
        directory.mkdir(parents=True)
        (directory / "run.json").write_text("{}")
        overrides = {"debug.seed": run.seed, **dict(run.tune)}
        (directory / "config.toml").write_text(to_toml(load_file(chosen.question.path, overrides, run.arm).config))


def test_arms_are_interleaved_and_every_other_seed_goes_backwards(question_file):
    order = [(run.seed, run.arm) for run in planned(question_file).runs]
    assert order == [(1, "low"), (1, "high"), (1, "higher"), (2, "higher"), (2, "high"), (2, "low")]


def test_aa_repeats_the_baseline_on_the_same_and_on_disjoint_seeds(question_file):
    edit(question_file, "[ablation]", "[ablation]\naa = true")
    chosen = planned(question_file, gpus=2)
    places = [str(run.place) for run in chosen.runs if run.arm == "low"]
    assert sorted(places) == ["low/seed1-2gpu", "low/seed1-2gpu-repeat2", "low/seed2-2gpu"] + [
        "low/seed2-2gpu-repeat2",
        "low/seed3-2gpu",
        "low/seed4-2gpu",
    ]
    assert [run.index for run in chosen.runs] == list(range(1, 11))
    assert len({run.place for run in chosen.runs}) == 10
    edit(question_file, "seeds = [1, 2]", "seeds = [2, 5]")
    assert planned(question_file).guarded.question.aa_seeds == [6, 7]


def test_every_arm_runs_the_whole_tune_grid(question_file):
    edit(question_file, "[ablation]", '[ablation]\naa = true\ntune = { "optimizer.eps" = [1e-8, 1e-7, 1e-6] }')
    chosen = planned(question_file)
    assert len(chosen.runs) == 3 * 3 * 2 + 4
    run = next(run for run in chosen.runs if run.arm == "high" and run.tune == (("optimizer.eps", 1e-7),))
    assert str(run.place) == "high/tune-eps=1e-07/seed1-1gpu"
    command = chosen.command(run, Path("out"))
    assert command[command.index("--optimizer.eps") + 1] == "1e-07"
    assert chosen.configuration(run)["optimizer.eps"] == 1e-7
    assert {run.tune for run in chosen.runs if run.repeat == 2} == {(("optimizer.eps", 1e-7),)}


def test_command(question_file):
    chosen = planned(question_file, overrides=("--training.gc_freq", "7"))
    words = chosen.command(chosen.runs[1], Path("out"))
    assert words[1].endswith("fake_trainer.py")
    assert words[2:] == [
        *("--job.config_file", str(question_file), "--ablation.arm", "high", "--debug.seed", "1"),
        *("--job.run_dir", "out/high/seed1-1gpu", "--training.gc_freq", "7"),
    ]
    several = planned(question_file, gpus=4)
    assert several.command(several.runs[0], Path("out"))[1:6] == [
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=4",
    ]


def test_unknown_arms_and_seeds(question_file):
    chosen = planned(question_file)
    assert [run.arm for run in chosen.choose(["high"], [2])] == ["high"]
    with pytest.raises(ConfigError, match='--arms hihg: no such arm in .* - did you mean "high"?'):
        chosen.choose(["hihg"], [])
    with pytest.raises(ConfigError, match="--seeds 9: not a seed of .*, which plans 1, 2"):
        chosen.choose([], [9])


def test_other_machines_are_refused(question_file):
    edit(question_file, "[ablation]", "[ablation]\nruns_on = { gpus = [2, 8] }")
    with pytest.raises(ConfigError, match=r"runs_on.gpus = \[2, 8\], but this is NGPU=1"):
        check_processes(read(question_file), 1, anywhere=False)
    check_processes(read(question_file), 1, anywhere=True)
    check_processes(read(question_file), 2, anywhere=False)


def test_data_that_is_missing_is_refused_before_the_first_run(question_file):
    edit(
        question_file.with_name("base.toml"), "[validation]", '[data]\ncorpus = "text"\npath = "nowhere"\n[validation]'
    )
    with pytest.raises(ConfigError, match="nowhere"):
        check_files(planned(question_file))


def test_an_unchanged_question_goes_on_in_its_folder(question_file):
    chosen = planned(question_file)
    assert folder_for(chosen, new=False) == Path("outputs/rates")
    keep(chosen, Path("outputs/rates"))
    assert folder_for(planned(question_file), new=False) == Path("outputs/rates")
    edit(question_file, "seeds = [1, 2]", "seeds = [1, 2, 3, 4]")
    assert folder_for(planned(question_file), new=False) == Path("outputs/rates")


def test_a_changed_question_is_refused_by_key_or_gets_a_new_folder(question_file):
    keep(planned(question_file), Path("outputs/rates"))
    edit(question_file, "optimizer.lr = 2e-3", "optimizer.lr = 4e-3")
    with pytest.raises(
        ConfigError, match=r"outputs/rates/high/.*: was run with optimizer.lr = 0.002, now 0.004. .*--new"
    ):
        folder_for(planned(question_file), new=False)
    second = folder_for(planned(question_file), new=True)
    assert second == Path("outputs/rates-2")
    keep(planned(question_file), second)
    assert folder_for(planned(question_file), new=False) == second  # and it goes on there
    assert folder_for(planned(question_file), new=True) == Path("outputs/rates-3")
    assert folders(read(question_file), Path("outputs")) == [Path("outputs/rates"), second]


def test_a_changed_base_is_refused_by_key(question_file):
    keep(planned(question_file), Path("outputs/rates"))
    edit(question_file.with_name("base.toml"), "seq_len = 128", "seq_len = 64")
    with pytest.raises(ConfigError, match="training.seq_len = 128, now 64"):
        folder_for(planned(question_file), new=False)


def test_an_override_on_some_runs_only_is_refused(question_file):
    """Runs of one arm are there; running the others with an override would reach one side only."""
    keep(planned(question_file), Path("outputs/rates"))
    leaves = {"optimizer.weight_decay": 0.5}
    overridden = plan(guard(read(question_file), leaves).accepted(), 1, ["--optimizer.weight_decay", "0.5"])
    with pytest.raises(ConfigError, match="optimizer.weight_decay = 0.1, now 0.5"):
        check_folder(overridden, Path("outputs/rates"))


def test_an_arm_that_is_gone_is_refused(question_file):
    keep(planned(question_file), Path("outputs/rates"))
    edit(question_file, "[arms.higher]", "[arms.highest]")
    with pytest.raises(ConfigError, match='holds runs of arm "higher", which the question no longer has'):
        folder_for(planned(question_file), new=False)
