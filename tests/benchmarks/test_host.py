"""The benchmark of the host: its rows at small sizes, phases of a start, and a table that goes on."""

import json
import time
from types import SimpleNamespace

import pytest

from benchmarks import host
from benchmarks.start_phases import Phases

TINY = ("--loader_s", "0.05", "--sequences", "2", "--seq_len", "64", "--tokenizer", "bytes")


def table(tmp_path, *options: str, code: int = 0) -> dict:
    assert host.main(["--out", str(tmp_path / "host"), *TINY, *options]) == code
    return json.loads((tmp_path / "host.json").read_text())


def test_loader_files_and_check_are_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(host, "PythonCorpus", lambda roots: host_corpus(tmp_path))
    monkeypatch.setattr(host, "NEEDED", 1000)
    found = table(tmp_path, "--only", "loader;files;check")["rows"]
    assert len(found) == len(host.PACKINGS) + 3 and not [row["error"] for row in found.values() if "error" in row]
    for name, row in found.items():
        if name.startswith("loader"):
            assert row["times_needed"] == row["tokens_per_s"] / 1000 > 1
    assert found["files"]["files"] == 3 and found["files"]["bytes"] == 3 and found["check"]["questions"] > 20
    page = (tmp_path / "host.md").read_text()
    assert page.count("\n| ") == len(found) + 1 and "tokens/s" in page and "remembered" in page


def host_corpus(folder):
    from data.corpora import TextCorpus

    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for name in "abc":
        (texts / f"{name}.txt").write_text(name)
    corpus = TextCorpus(str(texts))
    corpus._files = lambda: iter(corpus.files)  # type: ignore[attr-defined]
    return corpus


def test_a_table_goes_on_and_a_slow_loader_fails(tmp_path, monkeypatch, capsys):
    calls = []

    def broken(folder, options):
        calls.append("b")
        raise RuntimeError("no compiler")

    def slow(folder, options):
        calls.append("a")
        return {"tokens_per_s": 9.0, "times_needed": 0.5}

    monkeypatch.setattr(host, "rows", lambda cuda: {"loader, a": slow, "step, b": broken})
    assert table(tmp_path, code=1)["rows"]["step, b"] == {"error": "RuntimeError: no compiler"}
    assert "loader, a: below" in capsys.readouterr().err
    table(tmp_path, code=1)
    assert calls == ["a", "b", "b"]  # what failed is tried again
    table(tmp_path, "--budget_s", "-1", code=1)
    assert len(calls) == 3 and "out of time before step, b" in capsys.readouterr().out


def test_rows_cover_both_devices_where_there_are_two():
    cpu, both = host.rows(cuda=False), host.rows(cuda=True)
    assert set(both) - set(cpu) == {name.replace("cpu", "cuda") for name in cpu if name.startswith("step")}


def test_phases_of_a_start_add_up():
    begun = time.time() - 5.0
    phases, owner = Phases(begun), SimpleNamespace(load=lambda: 1, step=lambda: 2)
    phases.mark("imports")
    phases.after(owner, "load", "configuration")
    phases.after(owner, "step", "first step")
    assert (owner.load(), owner.step(), owner.step()) == (1, 2, 2)
    assert list(phases.seconds) == ["imports", "configuration", "first step"]
    assert phases.seconds["imports"] >= 5.0 and sum(phases.seconds.values()) == pytest.approx(phases.last - begun)


def test_a_run_of_train_py_says_its_phases_and_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from tests.data.generated import generated_texts, write_jsonl

    corpus = write_jsonl(tmp_path / "corpus" / "rows.jsonl", generated_texts(200)).parent
    data = {"data.corpus": "text", "data.path": str(corpus), "model.n_layers": 1, "training.steps": 6}
    changes = host.NARROW | data | {"job.run_dir": str(tmp_path / "run")}
    said = host._train("llama_debug", changes, "cpu", "-m", "benchmarks.start_phases", str(time.time()))
    phases = json.loads(said.strip().splitlines()[-1])
    names = ["interpreter and torch", "other imports", "configuration", "data", "run directory", "model", "optimizer"]
    assert list(phases) == [*names, "first step"] and all(seconds >= 0 for seconds in phases.values())
    times = [s for _, s in host.timed_steps(host.metrics_lines(tmp_path / "run"))]
    assert len(times) == 3 and min(times) > 0  # three steps of warm-up
