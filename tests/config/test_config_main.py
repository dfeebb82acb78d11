"""``python -m config`` as a user runs it: exit codes, no traceback, nothing created."""

import subprocess
import sys
from pathlib import Path

from config.__main__ import main
from tests.config.refusal import tree

ROOT = Path(__file__).resolve().parents[2]


def test_a_mistake_is_one_message_and_exit_code_2(tmp_path):
    (tmp_path / "a.toml").write_text("[training]\nstepz = 5\n")
    before = tree(tmp_path)
    command = [sys.executable, "-m", "config", "show", "a.toml"]
    out = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr == "a.toml: training.stepz: unknown key - did you mean 'steps'?\n"
    assert tree(tmp_path) == before


def test_show_diff_and_check(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("[arms.x]\ntraining.steps = 300\n[arms.y]\ntraining.steps = 301\n")
    assert main(["show", "a.toml:x"]) == 0
    assert "= 300" in capsys.readouterr().out
    assert main(["diff", "a.toml:x", "a.toml:y"]) == 0
    assert "300 -> 301" in capsys.readouterr().out
    words = ["check", "--job.config_file", "a.toml", "--ablation.arm", "x"]
    assert main(words) == 0 and capsys.readouterr().out == ""
    monkeypatch.setenv("NGPU", "3")
    assert main([*words, "--training.global_batch_size", "16", "--training.local_batch_size", "8"]) == 2
    assert "data-parallel degree(3)" in capsys.readouterr().err


def test_an_unknown_command_shows_the_commands(capsys):
    assert main(["shwo"]) == 2
    assert "python -m config show FILE" in capsys.readouterr().err
    assert main([]) == 0
    for words, said in ((["show"], "show: takes a FILE"), (["diff", "a.toml"], "diff: takes two files, A and B")):
        assert main(words) == 2
        assert said in capsys.readouterr().err


def test_an_ablation_without_an_arm_is_told_how_to_name_one(tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text("[arms.x]\ntraining.steps = 300\n")
    assert main(["show", str(path)]) == 2
    assert f"(arms: x); for python -m config that is {path}:NAME" in capsys.readouterr().err
