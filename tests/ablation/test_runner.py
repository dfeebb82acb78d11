"""The runner against a fake trainer: what fails, what is interrupted, what is killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ablation import child, lock
from ablation.guard import guard
from ablation.plan import Plan, plan
from ablation.question import read
from ablation.runner import clock, dry_run, execute, state_of
from config.errors import ConfigError

FOLDER = Path("outputs/rates")


@pytest.fixture
def chosen(question_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Plan:
    monkeypatch.setenv("FAKE_JOURNAL", str(tmp_path / "journal"))
    return plan(guard(read(question_file)).accepted())


def journal() -> list[str]:
    return Path("journal").read_text().splitlines() if Path("journal").exists() else []


def losses() -> dict[str, list[float]]:
    """Every run's losses, by place."""
    found = {}
    for path in sorted(FOLDER.glob("*/seed*/metrics.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.parent.relative_to(FOLDER))] = [line["validation_metrics/loss"] for line in lines]
    return found


def start_runner() -> subprocess.Popen:
    """The runner as a process of its own; its report is not wanted here."""
    code = (
        "import sys; from pathlib import Path; from ablation.guard import guard; from ablation.plan import plan;"
        "from ablation.question import read; from ablation.runner import execute;"
        "p = plan(guard(read(Path('rates.toml'))).accepted()); sys.exit(execute(p, Path('outputs/rates'), p.runs))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A test run in the background of a script has Ctrl-C ignored, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_log_begins_with_a_command_that_can_be_pasted(tmp_path):
    words = [sys.executable, "-c", "pass", "a folder/train.py"]
    assert child.run(words, tmp_path / "log") == 0
    assert (tmp_path / "log").read_text().splitlines()[0] == "$ " + shlex.join(words)


def test_every_run_once_in_order_then_nothing_to_do(chosen):
    said: list[str] = []
    assert execute(chosen, FOLDER, chosen.runs, say=said.append) == 0
    expected = [str(FOLDER / run.place) for run in chosen.runs]
    assert [line.split()[1] for line in journal() if line.startswith("start")] == expected
    assert said[0] == "outputs/rates: 0 of 6 runs done, 6 to go" and said[-1] == "outputs/rates: 6 of 6 runs done"
    assert said[1] == "run 1 of 6: low seed 1" and said[3].startswith("run 2 of 6, ETA 0:0")
    assert "validation loss" in said[2] and "1,000 tokens/s" in said[2]
    assert (FOLDER / "low/seed1-1gpu.log").read_text().startswith("$ ")
    assert execute(chosen, FOLDER, chosen.runs, say=said.append) == 0
    assert len(journal()) == 12


def test_a_failed_arm_does_not_stop_the_others(chosen, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "high")
    said: list[str] = []
    assert execute(chosen, FOLDER, chosen.runs, say=said.append) == 1
    assert "outputs/rates: 4 of 6 runs done, 2 failed:" in said
    assert said[-1] == "  high seed 2: loss is NaN at step 4 (exit code 1) (outputs/rates/high/seed2-1gpu.log)"
    assert "  | something went wrong" in said
    monkeypatch.delenv("FAKE_FAIL")
    assert execute(chosen, FOLDER, chosen.runs, say=said.append) == 0
    assert said[-1] == "outputs/rates: 6 of 6 runs done"


def test_an_interrupted_run_is_continued_and_counted(chosen):
    cut = FOLDER / chosen.runs[1].place
    execute(chosen, FOLDER, chosen.runs[:2], say=lambda _: None)
    (cut / "DONE").unlink()
    said: list[str] = []
    assert execute(chosen, FOLDER, chosen.runs, say=said.append) == 0
    assert said[0].endswith("1 of 6 runs done, 5 to go")
    assert said[1].startswith("run 2 of 6, 1 resumed, ETA") and said[1].endswith("high seed 1")
    assert (cut / "attempts/1/run.json").exists()


def test_a_run_that_says_nothing_is_a_failure(chosen, monkeypatch, tmp_path):
    silent = tmp_path / "silent.py"
    silent.write_text("")
    monkeypatch.setenv("ABLATION_TRAINER", str(silent))
    said: list[str] = []
    assert execute(chosen, FOLDER, chosen.runs[:1], say=said.append) == 1
    assert "it ended without writing DONE" in said[-1]


def test_kill_9_and_start_again(chosen, monkeypatch):
    """Same set of runs, same losses, none repeated once done, none lost, and no orphan beside the second runner."""
    execute(chosen, FOLDER, chosen.runs, say=lambda _: None)
    undisturbed = losses()
    FOLDER.rename("undisturbed")
    Path("journal").unlink()
    monkeypatch.setenv("FAKE_HANG", "higher")
    runner = start_runner()
    wait_for(lambda: len([line for line in journal() if line.startswith("start")]) == 3)
    runner.kill()
    runner.wait()
    finished_before = [line for line in journal() if line.startswith("end")]
    assert len(finished_before) == 2
    monkeypatch.delenv("FAKE_HANG")
    second = start_runner()
    output, _ = second.communicate(timeout=60)
    assert second.returncode == 0, output
    assert "2 of 6 runs done, 4 to go" in output and "run 3 of 6, 1 resumed" in output
    assert losses() == undisturbed
    ends = [line for line in journal() if line.startswith("end")]
    assert len(ends) == len(set(ends)) == 6
    starts = [line for line in journal() if line.startswith("start")]
    assert len(starts) == 7  # the one that was cut, twice


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_ends_the_child_and_says_how_to_go_on(chosen, monkeypatch, number):
    monkeypatch.setenv("FAKE_HANG", "low")
    runner = start_runner()
    wait_for(lambda: len(journal()) == 1)
    runner.send_signal(number)
    output, _ = runner.communicate(timeout=50)  # the child did not get to the end of its step
    assert runner.returncode == 130
    assert f"stopped by {number.name}: 0 of 6 runs done; the same command continues" in output
    with lock.acquire(FOLDER / ".runner.lock", orphan_seconds=0):  # nothing holds it any more, the child neither
        assert state_of(FOLDER / chosen.runs[0].place) == "interrupted"


def test_one_runner_at_a_time(chosen, monkeypatch):
    monkeypatch.setenv("FAKE_HANG", "low")
    runner = start_runner()
    wait_for(lambda: len(journal()) == 1)
    with pytest.raises(ConfigError, match=f"another runner \\(pid {runner.pid} on"):
        execute(chosen, FOLDER, chosen.runs, say=lambda _: None)
    runner.terminate()
    runner.wait()


def test_the_lock_of_a_dead_runner_is_stale(tmp_path):
    path = tmp_path / ".runner.lock"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path.write_text(json.dumps({"pid": gone.pid, "host": os.uname().nodename, "started": "then"}))
    with lock.acquire(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_an_orphaned_run_is_waited_for(tmp_path):
    """The runner is gone, but a child of it still holds the lock."""
    path = tmp_path / ".runner.lock"
    with lock.acquire(path) as held:
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=(held.fd,))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    path.write_text(json.dumps({"pid": dead.pid, "host": os.uname().nodename, "started": "then"}))
    said: list[str] = []
    with pytest.raises(ConfigError, match="a run it started has not ended"):
        lock.acquire(path, orphan_seconds=0.0, say=said.append)

    def heard(line: str) -> None:
        said.append(line)
        orphan.terminate()

    with lock.acquire(path, say=heard):
        assert orphan.wait() == -signal.SIGTERM and "waiting for the run it left behind" in said[-1]


def test_array_tasks_share_the_folder_but_not_a_run(chosen, monkeypatch):
    with lock.acquire(FOLDER / ".runner.lock", shared=True):
        assert execute(chosen, FOLDER, chosen.runs[:1], alone=False, say=lambda _: None) == 0
        with pytest.raises(ConfigError, match="another runner"):
            execute(chosen, FOLDER, chosen.runs, say=lambda _: None)
    with (
        lock.acquire(FOLDER / f"{chosen.runs[1].place}.lock"),
        pytest.raises(ConfigError, match="another runner"),
    ):
        execute(chosen, FOLDER, chosen.runs[1:2], alone=False, say=lambda _: None)


def test_dry_run_touches_nothing(chosen):
    said: list[str] = []
    dry_run(chosen, FOLDER, chosen.runs, say=said.append)
    assert said[0].split() == ["1", "of", "6", "new", "low", "seed", "1"] and "--ablation.arm low" in said[1]
    assert len(said) == 12 and not FOLDER.exists() and not journal()


def test_clock():
    assert [clock(s) for s in (0.4, 750, 4000)] == ["0:00", "12:30", "1:06:40"]


def test_a_killed_launcher_leaves_no_worker_behind(tmp_path, monkeypatch):
    """torchrun's workers have sessions of their own; when it is killed they must not train beside the next run."""
    worker = "import os, time; open('worker', 'w').write(str(os.getpid())); time.sleep(60)"
    launcher = (
        "import os, signal, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True)\n"
        "while not os.path.exists('worker') or not open('worker').read(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.chdir(tmp_path)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    status = child.run([sys.executable, "-c", launcher], tmp_path / "log")
    assert status == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("worker").read_text()), 0)
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_a_runner_killed_a_moment_ago_and_not_waited_for_is_gone(tmp_path):
    """Its zombie keeps its number."""
    path = tmp_path / ".runner.lock"
    with lock.acquire(path) as held:
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.0)"], pass_fds=(held.fd,))
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    wait_for(lambda: Path(f"/proc/{zombie.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    path.write_text(json.dumps({"pid": zombie.pid, "host": os.uname().nodename, "started": "then"}))
    with lock.acquire(path, say=lambda _: None):
        assert orphan.wait() == 0
    zombie.wait()


def test_a_run_that_was_stopped_is_continued_and_one_that_failed_is_tried_again(tmp_path):
    for reason, state in (("interrupted", "interrupted"), ("loss is NaN at step 4", "failed")):
        (tmp_path / "FAILED").write_text(json.dumps({"reason": reason}))
        assert state_of(tmp_path) == state
    (tmp_path / "DONE").write_text("{}")
    assert state_of(tmp_path) == "done"
