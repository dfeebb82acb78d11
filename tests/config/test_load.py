"""Merging: order, origins, arms, what came from where, and a configuration that loads again as it was."""

import subprocess
import sys
from datetime import date
from pathlib import Path

import tomli

from config import torchtitan_keys
from config.errors import ConfigError
from config.keys import all_keys, checked, companions
from config.load import flatten, load, load_file, to_toml
from tests.config.refusal import refusal

ROOT = Path(__file__).resolve().parents[2]

ABLATION = """
base = "base.toml"
[ablation]
variable = "optimizer.lr"
[training]
steps = 20
[arms.low]
optimizer.lr = 1e-4
[arms.high]
"optimizer.lr" = 1e-2
[arms.long.training]
seq_len = 64
"""


def ablation(folder: Path) -> Path:
    (folder / "base.toml").write_text(
        "[training]\nsteps = 10\nlocal_batch_size = 2\n[lr_scheduler]\nwarmup_steps = 2\n"
    )
    (folder / "question.toml").write_text(ABLATION)
    return folder / "question.toml"


def test_later_layers_win_and_every_value_has_an_origin(tmp_path):
    path = ablation(tmp_path)
    resolved = load(["--job.config_file", str(path), "--ablation.arm", "low", "--training.max_norm", "2"])
    assert resolved.origins["training.local_batch_size"] == "base.toml"
    assert resolved.origins["training.steps"] == "question.toml"
    assert resolved.origins["optimizer.lr"] == "question.toml [arms.low]"
    assert resolved.origins["training.max_norm"] == "command line"
    assert resolved.origins["debug.seed"] == "default"
    assert resolved.origins.keys() == all_keys().keys()
    assert resolved.config.job.config_file == str(path)
    assert resolved.base_diff == {
        "optimizer.lr": (8e-4, 1e-4),
        "training.steps": (10, 20),
        "training.max_norm": (1.0, 2.0),
    }
    assert resolved.ablation == {"variable": "optimizer.lr"}
    assert resolved.arms["high"] == {"optimizer.lr": 1e-2} and resolved.arms["long"] == {"training.seq_len": 64}
    assert resolved.arm == "low"


def test_without_a_base_the_file_is_the_base(tmp_path):
    (tmp_path / "a.toml").write_text("[training]\nsteps = 5\n")
    assert load_file(tmp_path / "a.toml").base_diff == {}
    assert load_file(tmp_path / "a.toml", {"training.steps": 6}).base_diff == {"training.steps": (5, 6)}


def test_what_names_a_run_is_not_a_difference(tmp_path):
    (tmp_path / "a.toml").write_text("")
    resolved = load(
        ["--job.config_file", str(tmp_path / "a.toml"), "--job.run_dir", str(tmp_path / "r"), "--job.dry_run"]
    )
    assert resolved.base_diff == {}


def test_an_ablation_without_an_arm_names_its_arms(tmp_path):
    message = refusal(tmp_path, load_file, ablation(tmp_path))
    assert "question.toml is an ablation" in message and "--ablation.arm NAME (arms: low, high, long)" in message


def test_unknown_arm_or_no_arms(tmp_path):
    path = ablation(tmp_path)
    assert 'has no arm "hihg" - did you mean "high"?' in refusal(tmp_path, load_file, path, arm="hihg")
    assert "base.toml has no [arms]" in refusal(tmp_path, load_file, tmp_path / "base.toml", arm="low")
    assert "has no [arms]" in refusal(tmp_path, load, ["--ablation.arm", "low"])


def test_arms_combine_unless_they_disagree(tmp_path):
    path = ablation(tmp_path)
    config = load_file(path, arm="low+long").config
    assert (config.optimizer.lr, config.training.seq_len) == (1e-4, 64)
    message = refusal(tmp_path, load_file, path, arm="low+high")
    assert "low sets optimizer.lr = 0.0001, high sets it to 0.01" in message


def test_overrides_are_checked_like_a_file(tmp_path):
    (tmp_path / "a.toml").write_text("")
    assert "--training.stepz: unknown key" in refusal(tmp_path, load_file, tmp_path / "a.toml", {"training.stepz": 1})
    assert "expected an integer" in refusal(tmp_path, load_file, tmp_path / "a.toml", {"training.steps": "1"})


def test_a_resolved_configuration_loads_again_as_it_is(tmp_path):
    words = ["--model.dim", "96", "--optimizer.weight_decay_skip", "norm,bias", "--data.roots", "site-packages"]
    words += ["--job.description", 'a "quoted" line', "--debug.data_seed", "3", "--optimizer.lr", "1e-5"]
    config = load(words).config
    (tmp_path / "config.toml").write_text(to_toml(config))
    again = load_file(tmp_path / "config.toml").config
    again.job.config_file = config.job.config_file
    assert again == config
    tables = tomli.loads(to_toml(config))
    assert "config_file" not in tables["job"] and "run_dir" not in tables["job"]


def test_flatten_covers_every_key():
    assert flatten(load([]).config).keys() == all_keys().keys()


def test_every_companion_has_a_parent_that_can_hold_the_values():
    for child, (parent, values) in companions().items():
        key = all_keys()[parent]
        assert values, child
        for value in values:
            assert checked(key, value) == value, (child, parent, value)


def test_a_key_set_on_purpose_without_effect_is_noted():
    (note,) = load(["--compile.backend", "eager"]).notes
    assert note == "compile.backend (command line) has no effect while compile.enable = false"
    assert load(["--compile.backend", "eager", "--compile.enable"]).notes == []


def test_an_arm_that_sets_an_inert_key_is_noted(tmp_path):
    (tmp_path / "a.toml").write_text('[arms.x]\ncompile.backend = "eager"\n')
    assert "compile.backend (a.toml [arms.x]) has no effect" in load_file(tmp_path / "a.toml", arm="x").notes[0]


def test_no_value_of_any_key_ends_in_a_traceback(tmp_path):
    (tmp_path / "a.toml").write_text("")
    odd = [0, 1.5, True, "x", "", [], ["a"], {}, {"a": 1}, float("nan"), date(2020, 1, 1), [[1]], [{"a": 1}]]
    for full in [*all_keys(), *torchtitan_keys.names()]:
        for value in odd:
            try:
                load_file(tmp_path / "a.toml", {full: value})
            except ConfigError as error:
                assert full.partition(".")[2] in str(error)


def test_loading_imports_nothing_that_takes_seconds(tmp_path):
    program = (
        "import sys; from config.load import load\n"
        f"load(['--job.config_file', {str(ablation(tmp_path))!r}, '--ablation.arm', 'low'])\n"
        "print([m for m in ('torch', 'numpy', 'tyro', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
