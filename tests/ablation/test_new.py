"""``new`` infers what two files differ in; ``export`` gives files that load by themselves."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ablation import export, question
from ablation.guard import guard
from ablation.new import main, write
from ablation.question import read
from config.errors import ConfigError
from config.load import flatten, load_file

BASE = "[training]\nglobal_batch_size = 8\n[validation]\nenable = true\n"


@pytest.fixture
def files(tmp_path: Path):
    """Write one plain file a text, named a.toml, b.toml, ..."""

    def build(*texts: str) -> list[Path]:
        paths = [tmp_path / f"{name}.toml" for name in "abcd"[: len(texts)]]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(BASE + text)
        return paths

    return build


def test_one_key(files, tmp_path):
    target = tmp_path / "asked" / "rates.toml"
    paths = files("[optimizer]\nlr = 1e-3\n", "[optimizer]\nlr = 2e-3\n", "[optimizer]\nlr = 3e-3\n")
    script = write(paths, target)
    guarded = guard(read(target)).accepted()
    assert guarded.question.variables == ["optimizer.lr"] and list(guarded.arms) == ["a", "b", "c"]
    for path in paths:
        assert guarded.arms[path.stem].flat["optimizer.lr"] == load_file(path).config.optimizer.lr
    assert script == target.with_suffix(".sh") and len(script.read_text().splitlines()) == 2
    assert subprocess.run(["bash", "-n", script]).returncode == 0


def test_companions_follow(files, tmp_path):
    target = tmp_path / "compiled.toml"
    write(files("", '[compile]\nenable = true\nbackend = "eager"\n'), target)
    arm = guard(read(target)).accepted().arms["b"]
    assert arm.changes == {"compile.enable": (False, True)}
    assert arm.companions == {"compile.backend": ("inductor", "eager")}


def test_what_cannot_be_a_question_is_refused_and_nothing_written(files, tmp_path):
    target = tmp_path / "asked" / "x.toml"
    two = "[optimizer]\nlr = 2e-3\nweight_decay = 0.0\n"
    for texts, said in (
        (("", ""), "the same configuration"),
        (("", '[compile]\nbackend = "eager"\n'), "the same configuration"),  # without effect
        (("", two), "differ in 2 keys"),
        (("[model]\ndim = 64\n", ""), "leaves model.dim unset"),
    ):
        with pytest.raises(ConfigError, match=said):
            write(files(*texts), target)
    a, b = files("", "[optimizer]\nlr = 2e-3\n")
    for path in (a, b):
        path.write_text(path.read_text().replace("global_batch_size = 8", ""))
    with pytest.raises(ConfigError, match="global_batch_size is unset"):
        write([a, b], target)
    with pytest.raises(ConfigError, match="two or more"):
        write([a], target)
    assert not target.exists() and not target.with_suffix(".sh").exists()


@pytest.mark.parametrize(("design", "arms"), [("factorial", 4), ("ladder", 3)])
def test_several_keys_with_a_design(files, tmp_path, design, arms):
    target = tmp_path / "several.toml"
    write(files("", "[optimizer]\nlr = 2e-3\nweight_decay = 0.0\n"), target, design)
    guarded = guard(read(target)).accepted()
    assert len(guarded.arms) == arms
    last = list(guarded.arms.values())[-1]
    assert last.name == "lr+weight_decay" and last.flat == {
        **flatten(load_file(tmp_path / "b.toml").config),
        "job.config_file": last.flat["job.config_file"],
    }


@pytest.mark.parametrize("suffix", [".toml", ".sh"])
def test_nothing_is_overwritten(files, tmp_path, suffix):
    target = tmp_path / "mine.toml"
    target.with_suffix(suffix).write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        write(files("", "[optimizer]\nlr = 2e-3\n"), target)
    assert target.with_suffix(suffix).read_text() == "mine"


def test_the_command_names_and_sums_up(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ablation.new.QUESTIONS", tmp_path / "asked")
    assert main([str(p) for p in files("", "[optimizer]\nlr = 2e-3\n")]) == 0
    assert "a_vs_b: variable optimizer.lr, 2 arms x 3 seeds + 6 A/A = 12 runs" in capsys.readouterr().out


def test_export_gives_files_that_are_the_arms(question_file, capsys):
    assert export.main([str(question_file)]) == 0
    guarded = guard(read(question_file))
    for name, arm in guarded.arms.items():
        alone = flatten(load_file(Path("outputs/rates-toml") / f"{name}.toml").config)
        assert alone | {"job.config_file": ""} == arm.flat | {"job.config_file": ""}
    assert export.main([str(question_file)]) == 0  # the same again is no harm
    Path("outputs/rates-toml/high.toml").write_text("mine")
    with pytest.raises(ConfigError, match="is there with another content"):
        export.main([str(question_file)])
    assert question.relative(question_file) == "rates.toml"
