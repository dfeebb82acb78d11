"""The commands as a user types them: exit codes, messages, no torch, no waiting."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ablation import question
from ablation.__main__ import main
from ablation.question import all_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def asked(question_file, monkeypatch, capsys):
    """Run a command where the only question is rates; gives (exit code, stdout, stderr)."""
    monkeypatch.setattr(question, "QUESTIONS", question_file.parent / "asked")
    (question_file.parent / "asked").mkdir()
    inside = question.QUESTIONS / "rates.toml"
    inside.write_text(question_file.read_text().replace("base.toml", "../base.toml"))

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main(list(words))
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_check_and_list(asked):
    assert asked("check") == (0, "rates: variable optimizer.lr, 3 arms x 2 seeds = 6 runs\n", "")
    code, out, _ = asked("list")
    assert code == 0 and "arms: low (baseline), high, higher" in out and "no results" in out
    assert asked("run", "rates", "--dry_run")[0] == 0


def test_a_place_that_cannot_be_written_is_one_message(asked, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    code, _, err = asked("export", "rates", str(tmp_path / "file" / "x"))
    assert code == 2 and err.startswith(str(tmp_path / "file" / "x")) and "Not a directory. Choose another" in err
    (tmp_path / "outputs").touch()  # where a run's console output would go
    monkeypatch.chdir(tmp_path)
    code, _, err = asked("run", "rates")
    assert code == 2 and "outputs" in err and len(err.splitlines()) == 1


def test_check_names_every_violation_of_every_file(asked):
    text = (question.QUESTIONS / "rates.toml").read_text()
    (question.QUESTIONS / "first.toml").write_text(text.replace("[1, 2]", "[1]").replace("step = 100", "step = 33"))
    (question.QUESTIONS / "second.toml").write_text("[training]\nsteps = 1\n")
    (question.QUESTIONS / "third.toml").write_text("[ablation\n")
    code, out, err = asked("check")
    assert code == 2 and out.startswith("rates: ")
    lines = err.splitlines()
    assert lines[0].startswith("asked/first.toml: ablation.seeds = [1]: fewer than two seeds")
    assert lines[1].startswith("asked/first.toml: ablation.decide.step = 33")
    assert "second.toml: no [ablation] table" in lines[2] and "third.toml, line 1" in lines[3]
    assert lines[4] == "3 refused"
    assert "first: refused" in asked("list")[1]


def test_run_one_task_then_list_counts_it(asked):
    assert asked("run", "rates", "--count")[1] == "6\n"
    code, out, _ = asked("run", "rates", "--only", "2")
    assert code == 0 and "run 2 of 6: high seed 1" in out
    assert "outputs/rates: 1 of 6 done on 1 GPU(s)" in asked("list")[1]


def test_a_failed_arm_is_in_the_exit_code_though_a_report_is_written(asked, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "high")
    reports: list[list[str]] = []
    monkeypatch.setattr("ablation.compare.main", lambda words: reports.append(words) or 0)
    assert asked("run", "rates")[0] == 1 and reports == [["outputs/rates"]]


def test_a_changed_question_is_refused_and_new_starts_over(asked):
    asked("run", "rates", "--only", "1")
    code, _, err = asked("run", "rates", "--only", "1", "--optimizer.weight_decay", "0.3")
    assert code == 2 and "was run with optimizer.weight_decay = 0.1, now 0.3" in err
    code, out, _ = asked("run", "rates", "--new", "--dry_run", "--optimizer.weight_decay", "0.3")
    assert code == 0 and "outputs/rates-2/low/seed1-1gpu" in out and "--optimizer.weight_decay 0.3" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "ratse"], 'no such question - did you mean "rates"?'),
        (["run", "rate.toml"], 'rate.toml: no such file - did you mean "rates"?'),
        (["check", "xyz"], "xyz: no such question; `python -m ablation list` shows those there are"),
        (["run", "rates", "--dryrun"], '--dryrun: not an option of run - did you mean "--dry_run"?'),
        (["run", "--training.steps", "9", "rates", "--dry_run"], "run: which question? Its NAME comes first"),
        (["chekc"], 'no such command - did you mean "check"?'),
        (["run", "rates", "--arms", "hihg"], 'did you mean "high"?'),
        (["run", "rates", "--seeds", "7"], "not a seed of"),
        (["run", "rates", "--seeds", "x"], "expected whole numbers"),
        (["run", "rates", "--only", "7"], "the plan has runs 1 to 6"),
        (["run", "rates", "--only", "1", "--new"], "leave out --new"),
        (["run", "rates", "--optimizer.lrr", "1"], "unknown key"),
        (["run", "rates", "--optimizer.lr", "1"], "an override must reach every arm"),
        (["run", "rates", "--arms.high.optimizer.lr", "1"], "belongs in the TOML file"),
        (["check", "--all"], "takes names of questions only"),
    ],
)
def test_mistakes_exit_with_2(asked, words, said):
    code, _, err = asked(*words)
    assert code == 2 and said in err and not Path("outputs").exists()


def test_more_processes_than_the_question_is_meant_for(asked, monkeypatch):
    path = question.QUESTIONS / "rates.toml"
    path.write_text(path.read_text().replace("[ablation]", "[ablation]\nruns_on = { gpus = [2] }"))
    assert "runs_on.gpus = [2], but this is NGPU=1" in asked("run", "rates", "--dry_run")[2]
    assert asked("run", "rates", "--dry_run", "--anywhere")[0] == 0
    monkeypatch.setenv("NGPU", "2")
    assert "--nproc_per_node=2" in asked("run", "rates", "--dry_run")[1]
    monkeypatch.setenv("NGPU", "many")
    assert "NGPU = 'many'" in asked("run", "rates")[2]


def test_every_question_of_the_checkout_passes_in_under_a_second_without_torch():
    code = (
        "import sys; from ablation.__main__ import main; status = main(['check'])\n"
        "sys.exit(status or 3 * ('torch' in sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    took = []
    for _ in range(3):  # processor time, the best of three: other processes may be busy
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(done.stdout.splitlines()) == len(all_files()) > 0
    assert min(took) < 1.0, took


def test_every_question_has_a_script_that_runs_it():
    """They are one script under many names, so one is run."""
    texts = set()
    for path in all_files():
        script = path.with_suffix(".sh")
        assert os.access(script, os.X_OK), script
        texts.add(script.read_text())
    assert len(texts) == 1 and len(texts.pop().splitlines()) == 2
    path = all_files()[0]
    gpus = question.read(path).table.runs_on.get("gpus", [1])[0]
    done = subprocess.run(
        [path.with_suffix(".sh"), "--dry_run"],
        env={**os.environ, "NGPU": str(gpus), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert path.name in done.stdout


def test_a_closed_pipe_ends_without_a_traceback():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = '"$0" -m ablation list | true; echo ${PIPESTATUS[0]}'
    done = subprocess.run(["bash", "-c", command, sys.executable], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_slurm_array(question_file, tmp_path):
    """A stand-in for sbatch, which runs the first two tasks and then the last job at once."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        """#!/usr/bin/env bash
echo "$@" >> submitted
script="${@: -1}"
case "$*" in
    *--array*) for task in 1 2; do SLURM_ARRAY_TASK_ID=$task bash "$script" >> tasks 2>&1; done ;;
    *) bash "$script" --dry_run >> last 2>&1 ;;
esac
echo 17
"""
    )
    sbatch.chmod(0o755)
    path = f"{sbatch.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [ROOT / "ablation" / "slurm_array.sh", "rates.toml", "--time=1:00:00"]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "submitted 6 runs of rates.toml as job 17" in done.stdout
    array, last = Path("submitted").read_text().splitlines()
    assert array.startswith("--parsable --array=1-6%1 --time=1:00:00") and "--dependency=afterany:17" in last
    tasks = Path("tasks").read_text()
    assert "run 1 of 6: low seed 1" in tasks and "run 2 of 6" in tasks
    assert "2 of 6 runs done, 4 to go" in Path("last").read_text()
