"""One folder a run: unique, never shared, never a mix of two configurations, whole after a kill at any point."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from config.errors import ConfigError
from config.load import Resolved, flatten, load_file
from trainer import run_directory, run_lock
from trainer.run_directory import RunDirectory, open_run_directory, run_directory_state

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short record of the environment: the real one is tests/trainer/test_environment.py."""
    monkeypatch.setattr(
        run_directory, "describe_environment", lambda root, deterministic: ({"git_dirty": True}, b"patch")
    )


def resolve(tmp_path: Path, **overrides) -> Resolved:
    file = tmp_path / "tiny.toml"
    if not file.exists():
        file.write_text('[training]\nsteps = 20\n[data]\nroots = ["a b", "c"]\n')
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_file(file, {"job.dump_folder": str(tmp_path / "outputs"), **named})


def open_it(resolved: Resolved, **record):
    return open_run_directory(resolved, command=["train.py"], record=record)


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_new_directory_holds_the_record(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, training__seq_len=64)
    run = open_it(resolved, corpus_hash="abc", tokens_per_step=128)
    assert run.state == "new" and run.path.parent == tmp_path / "outputs" / "tiny"
    again = load_file(run.path / "config.toml")
    ours, theirs = flatten(resolved.config), flatten(again.config)
    assert {k: v for k, v in theirs.items() if not k.startswith("job.")} == {
        k: v for k, v in ours.items() if not k.startswith("job.")
    }
    record = json.loads((run.path / "run.json").read_text())
    assert record["schema"] == 1 and record["command"] == ["train.py"] and record["corpus_hash"] == "abc"
    assert record["base_diff"]["training.seq_len"] == [2048, 64]
    assert record["origins"]["training.steps"] == "tiny.toml"
    assert record["ablation"] is None
    assert (run.path / "dirty.patch").read_bytes() == b"patch"
    assert json.loads((run.path / "environment.json").read_text()) == {"git_dirty": True}
    assert not (run.path / "DONE").exists() and not (run.path / "FAILED").exists()
    run.add_to_record(warnings=["slow path"])
    assert json.loads((run.path / "run.json").read_text()) == {**record, "warnings": ["slow path"]}


def test_an_arm_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rate.toml"
    file.write_text(
        '[ablation]\nquestion = "?"\nvariable = "optimizer.lr"\nbaseline = "low"\n'
        "[arms.low]\noptimizer.lr = 1e-4\n[arms.high]\noptimizer.lr = 1e-3\n[training]\nglobal_batch_size = 8\n"
    )
    file.write_text(file.read_text().replace("[arms.low]", 'tune = { "optimizer.eps" = [1e-8, 1e-7] }\n[arms.low]'))
    overrides = {"job.run_dir": str(tmp_path / "run"), "optimizer.eps": 1e-7}
    run = open_it(load_file(file, overrides, arm="high"))
    named = {"name": "rate", "arm": "high", "file": str(file), "tune": {"optimizer.eps": 1e-7}}
    assert named.items() <= run.record["ablation"].items()


def test_runs_started_at_once_get_directories_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = iter(["aaaaaa"] * 8 + ["bbbbbb", "cccccc", "dddddd"] * 100)
    monkeypatch.setattr(run_directory.secrets, "token_hex", lambda n: next(few))
    resolved = resolve(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        runs = list(pool.map(lambda _: open_it(resolved), range(4)))
    assert len({run.path for run in runs}) == 4


def test_done_is_left_alone(tmp_path: Path) -> None:
    resolved = resolve(tmp_path, job__run_dir=str(tmp_path / "run"))
    open_it(resolved).finish("done", steps=20, skipped_steps=1)
    ending = json.loads((tmp_path / "run" / "DONE").read_text())
    assert ending["steps"] == 20 and ending["skipped_steps"] == 1 and ending["finished"]
    before = content(tmp_path / "run")
    described = resolve(tmp_path, job__run_dir=str(tmp_path / "run"), job__description="no part of the run")
    assert run_directory_state(described) == run_directory_state(described, opener=False) == "done"
    assert open_it(described).state == "done"
    assert content(tmp_path / "run") == before


def test_a_key_younger_than_the_run_had_its_default(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    resolved = resolve(tmp_path, job__run_dir=str(run_dir))
    open_it(resolved).finish("done", steps=20)
    whole = (run_dir / "config.toml").read_text()
    (run_dir / "config.toml").write_text(whole.replace("gc_freq = 50\n", ""))
    assert "gc_freq" in whole and "gc_freq" not in (run_dir / "config.toml").read_text()
    assert run_directory_state(resolved) == run_directory_state(resolved, opener=False) == "done"
    with pytest.raises(ConfigError, match="training.gc_freq = 50 there, 7 now"):
        run_directory_state(resolve(tmp_path, job__run_dir=str(run_dir), training__gc_freq=7))


@pytest.mark.parametrize("ended", ["done", "failed", "killed"])
def test_another_configuration_is_refused(tmp_path: Path, ended: str) -> None:
    run_dir = str(tmp_path / "run")
    run = open_it(resolve(tmp_path, job__run_dir=run_dir))
    if ended == "killed":
        os.close(run._lock)
    else:
        run.finish(ended, steps=3)
    before = content(tmp_path / "run")
    other = resolve(tmp_path, job__run_dir=run_dir, training__steps=30, model__dim=64, optimizer__lr=0.1)
    for refuse in (open_it, run_directory_state):
        with pytest.raises(ConfigError) as error:
            refuse(other)
        message = str(error.value)
        assert "holds another configuration" in message and run_dir in message
        assert "training.steps = 20 there, 30 now" in message
        assert "model.dim = unset there, 64 now" in message
        assert "optimizer.lr" in message and "seq_len" not in message
    assert run_directory_state(other, opener=False) == "new", "the opener says it, once"
    assert content(tmp_path / "run") == before


@pytest.mark.parametrize("ended", ["failed", "killed"])
def test_an_unfinished_attempt_is_moved_and_checkpoints_stay(tmp_path: Path, ended: str) -> None:
    path = tmp_path / "run"
    resolved = resolve(tmp_path, job__run_dir=str(path))
    for attempt in (1, 2):
        run = open_it(resolved, attempt=attempt)
        (path / "metrics.jsonl").write_text(f"attempt {attempt}\n")
        (path / "tb").mkdir()
        (path / "tb" / "events.out.tfevents.7").write_text(f"events {attempt}")
        (path / "checkpoint").mkdir(exist_ok=True)
        (path / "checkpoint" / f"step-{attempt}").write_text("weights")
        if ended == "failed":
            run.finish("failed", steps=5, reason="loss is nan")
        else:
            os.close(run._lock)
    assert run_directory_state(resolved) == "continued"
    run = open_it(resolved, attempt=3)
    assert run.state == "continued"
    assert sorted(p.name for p in path.iterdir() if p.name != ".lock") == [
        "attempts", "checkpoint", "config.toml", "dirty.patch", "environment.json", "run.json",
    ]  # fmt: skip
    for attempt in (1, 2):
        earlier = path / "attempts" / str(attempt)
        assert (earlier / "metrics.jsonl").read_text() == f"attempt {attempt}\n"
        assert (earlier / "tb" / "events.out.earlier.7").read_text() == f"events {attempt}", "TensorBoard skips it"
        assert json.loads((earlier / "run.json").read_text())["attempt"] == attempt
        assert (earlier / "FAILED").exists() == (ended == "failed")
    assert sorted(p.name for p in (path / "checkpoint").iterdir()) == ["step-1", "step-2"]


def test_earlier_metrics_are_those_up_to_the_step_and_the_latest_of_each(tmp_path: Path) -> None:
    for number, steps in ((2, (5, 10, 15)), (9, (10, 15, 20)), (10, (15, 16))):
        folder = tmp_path / "attempts" / str(number)
        folder.mkdir(parents=True)
        texts = [json.dumps({"step": step, "by": number}) for step in steps]
        (folder / "metrics.jsonl").write_text("\n".join([*texts, '{"step": 9']))  # cut off by a kill
    lines = RunDirectory(tmp_path, "continued", None, {}).earlier_metrics(15)
    assert [(line["step"], line["by"]) for line in lines] == [(5, 2), (10, 9), (15, 10)]


class Killed(BaseException):
    pass


def test_a_kill_at_any_point_of_opening_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rename is a point at which a kill shows. After each the directory opens, the old files in one attempt."""
    real_rename, real_replace = Path.rename, Path.replace
    for survive in range(100):
        path = tmp_path / str(survive)
        resolved = resolve(tmp_path, job__run_dir=str(path))
        first = open_it(resolved, attempt=1)
        (path / "metrics.jsonl").write_text("old")
        (path / "checkpoint").mkdir()
        (path / "evaluations").mkdir()
        first.finish("failed", steps=1)
        left = [survive]

        def dying(real, left=left):
            def move(self: Path, target: Path) -> Path:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return real(self, target)

            return move

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", dying(real_rename))
            patch.setattr(Path, "replace", dying(real_replace))
            try:
                open_it(resolved, attempt=2)
                killed = False
            except Killed:
                killed = True
        other = resolve(tmp_path, job__run_dir=str(path), training__steps=21)
        with pytest.raises(ConfigError, match="holds another configuration"):
            run_directory_state(other)
        if killed:
            assert open_it(resolved, attempt=3).state == "continued"
        attempts = sorted(p.name for p in (path / "attempts").iterdir())
        assert attempts == ["1"] or killed and attempts == ["1", "2"]
        old = content(path / "attempts" / "1")
        assert {"metrics.jsonl", "config.toml", "run.json", "environment.json", "dirty.patch", "FAILED"} <= set(old)
        assert json.loads(old["run.json"])["attempt"] == 1
        assert (path / "checkpoint").is_dir() and (path / "evaluations").is_dir()
        assert not (path / "metrics.jsonl").exists()
        assert not (path / "FAILED").exists()
        if not killed:
            break
    assert survive > 5, "the loop reached the end of an opening"


def test_a_kill_while_a_new_directory_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    resolved = resolve(tmp_path, job__run_dir=str(path))
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "to_toml", lambda config: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            open_it(resolved)
    assert (path / "run.json").exists() and not (path / "config.toml").exists()
    monkeypatch.setattr(run_directory, "describe_environment", lambda root, deterministic: ({"git_dirty": False}, b""))
    assert open_it(resolved).state == "new"
    assert not (path / "dirty.patch").exists(), "the patch of the attempt that never was is gone"


def test_what_is_no_run_directory_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter.tex").write_text("dear")
    with pytest.raises(ConfigError, match=r"not a run directory and not empty \(it holds chapter.tex\)"):
        open_it(resolve(tmp_path, job__run_dir=str(folder)))
    assert content(folder) == {"chapter.tex": b"dear"}
    with pytest.raises(ConfigError, match="is a file"):
        open_it(resolve(tmp_path, job__run_dir=str(folder / "chapter.tex")))
    (folder / "chapter.tex").unlink()
    assert open_it(resolve(tmp_path, job__run_dir=str(folder))).state == "new", "an empty folder may be used"


def test_a_folder_that_cannot_be_made_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    in_a_file = {"run_dir": tmp_path / "file" / "run", "dump_folder": tmp_path / "file"}
    for key, folder in in_a_file.items():
        resolved = resolve(tmp_path, **{f"job__{key}": str(folder)})
        for refuse in (open_it, run_directory_state):
            with pytest.raises(ConfigError, match=rf"job.{key} = .*: cannot be written: Not a directory"):
                refuse(resolved)


def test_a_folder_of_somebody_else_is_refused_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Path] = []
    monkeypatch.setattr(run_directory.os, "access", lambda path, mode: bool(asked.append(Path(path))))
    for key in ("run_dir", "dump_folder"):
        with pytest.raises(ConfigError, match=rf"job.{key} = .*: cannot be written: Permission denied"):
            run_directory_state(resolve(tmp_path, **{f"job__{key}": str(tmp_path / "deep" / "in")}))
    assert asked == [tmp_path, tmp_path]
    assert run_directory_state(resolve(tmp_path), opener=False) == "new"


_HOLD = """
import sys, time
from config.load import load_file
from trainer import run_directory
run_directory.describe_environment = lambda root, deterministic: ({}, b"")
resolved = load_file(sys.argv[1], {"job.run_dir": sys.argv[2]})
run_directory.open_run_directory(resolved, command=[], record={})
print("open", flush=True)
time.sleep(60)
"""


def test_a_live_run_is_refused_and_a_killed_one_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "WAIT_SECONDS", 0.1)
    path = tmp_path / "run"
    resolved = resolve(tmp_path, job__run_dir=str(path))
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "tiny.toml"), str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        before = content(path)
        for refuse in (run_directory_state, open_it):
            with pytest.raises(ConfigError, match=f"is in use by process {holder.pid}"):
                refuse(resolved)
        monkeypatch.setattr(run_directory, "run_directory_state", lambda resolved: "continued")
        with pytest.raises(ConfigError, match=f"is in use by process {holder.pid}"):
            open_it(resolved)  # two that asked before either opened
        assert content(path) == before
        # A slow rank of the run that holds the directory is not refused.
        assert run_directory_state(resolved, opener=False) == "new"
        monkeypatch.undo()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and run_lock.holder(path):
        time.sleep(0.05)
    assert run_directory_state(resolved) == "continued"


def test_asking_does_not_keep_others_from_asking(tmp_path: Path) -> None:
    path = tmp_path / "run"
    resolved = resolve(tmp_path, job__run_dir=str(path))
    open_it(resolved).finish("failed", steps=0)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: run_directory_state(resolved), range(40))) == {"continued"}
