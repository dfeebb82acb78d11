"""Runs of the two-rank tables: kept, read, and not repeated."""

import json
import time
from pathlib import Path

import pytest

from benchmarks import two_ranks as bench


def write_run(folder: Path, losses: list[float], seconds: float = 0.5, **tags: float) -> None:
    """A finished run of ``losses``, one log line a step; its last three steps were profiled."""
    folder.mkdir(parents=True)
    steps = len(losses)
    for step, loss in enumerate(losses, 1):
        excluded = [step] if step > steps - 3 or step == 1 else []
        slow = 10 * seconds if step in (1, 5) else seconds
        line = {"step": step, bench.LOSS: loss, "step_times_s": [slow], "excluded_steps": excluded}
        line |= {bench.MEMORY: 40.0 + step / 100} | (tags if step == steps else {})
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
    (folder / "run.json").write_text(json.dumps({"tokens_per_step": 1000, "world_size": 2}))
    (folder / "DONE").write_text(json.dumps({"steps": steps}))


def test_a_run_is_read_without_its_first_profiled_and_excluded_steps(tmp_path):
    write_run(tmp_path / "a", [3.0 - 0.1 * i for i in range(20)], **{bench.EXPOSED: 12.0})
    found = bench.read(tmp_path / "a")
    assert found["losses"][1] == 3.0 and len(found["losses"]) == 20
    assert found["step_s"] == 0.5 and found[bench.MEMORY] == pytest.approx(40.2)
    assert found[bench.EXPOSED] == 12.0 and found[bench.BUBBLE] is None
    assert bench.read(tmp_path / "nothing") == {"error": "not run"}


def test_what_is_done_or_failed_is_not_run_again_and_time_is_kept(tmp_path, monkeypatch):
    started = []

    class Done:
        returncode, stdout, stderr = 2, "", "train.toml: parallelism: refused\n"

    monkeypatch.setattr(bench.subprocess, "run", lambda words, **_: started.append(words) or Done())
    write_run(tmp_path / "done", [1.0])
    for name, reason in (("failed", "out of memory"), ("stopped", "interrupted")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "FAILED").write_text(json.dumps({"reason": reason}))
    runs = {name: {"training.steps": 3} for name in ("done", "failed", "stopped", "new")}
    base = tmp_path / "base.toml"
    assert bench.run_all(runs, base, tmp_path, until=time.monotonic() + 60, say=lambda _: None)
    assert [Path(words[-1]).name for words in started] == ["stopped", "new"]
    assert bench.read(tmp_path / "new") == {"error": "train.toml: parallelism: refused"}
    assert not bench.run_all({"later": {}}, base, tmp_path, until=time.monotonic() - 1, say=lambda _: None)
