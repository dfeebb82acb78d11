"""A run that is out of memory says what would help; one that is not, what each part of a step held."""

import json

import pytest
import torch

import train
from benchmarks.side import reason_of
from tests.data.generated import generated_texts, write_jsonl
from trainer.compilations import RECOMPILATIONS
from trainer.memory import PeakMemory
from trainer.metrics import Metrics
from trainer.profiling import Profiler
from trainer.spans import BACKWARD, FORWARD, OPTIMIZER, watch_spans

TINY = [
    "--model.n_layers", "1", "--training.local_batch_size", "1", "--training.global_batch_size", "2",
    "--validation.enable", "false", "--metrics.log_freq", "10",
]  # fmt: skip


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Of a small run."""
    corpus = write_jsonl(tmp_path / "corpus" / "rows.jsonl", generated_texts(50)).parent
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return [
        "--data.corpus", "text", "--data.path", str(corpus), "--data.tokenizer", "bytes", "--training.seq_len", "64",
        "--job.run_dir", str(tmp_path / "run"),
    ]  # fmt: skip


def test_the_reason_names_three_switches_and_the_snapshot(tmp_path, monkeypatch, capsys, words):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    monkeypatch.setattr(train, "train", full)
    monkeypatch.setattr(Profiler, "last_snapshot", lambda self: ". Memory snapshot: there")
    code = train.main([*words, "--training.steps", "2"])
    reason = json.loads((tmp_path / "run" / "FAILED").read_text())["reason"]
    assert code == 1 and "2.50 GiB more were asked for; by the estimate (" in reason
    assert reason.count(" GiB)") == 3 and "training.local_batch_size = 4" in reason
    assert reason.endswith(". Memory snapshot: there")
    said = capsys.readouterr().err
    assert reason in said and reason_of(1, said) == "out of memory"


def test_memory_is_watched_by_part_in_the_steps_that_are_logged(monkeypatch, words):
    seen: list[str] = []
    monkeypatch.setattr(PeakMemory, "by_part", lambda self: watch_spans(seen.append))
    windows: list[tuple[int, int]] = []
    log = Metrics.log

    def watched(self, step, *, times, fill_rates, **rest):
        windows.append((len(fill_rates), len(times.seconds)))
        log(self, step, times=times, fill_rates=fill_rates, **rest)

    monkeypatch.setattr(Metrics, "log", watched)
    assert train.main([*words, *TINY, "--training.steps", "4"]) == 0
    logged = [part for part in seen if part in (FORWARD, BACKWARD, OPTIMIZER)]
    assert logged == 2 * [FORWARD, BACKWARD, FORWARD, BACKWARD, OPTIMIZER], "steps 1 and 4, two micro-batches each"
    assert windows == [(1, 1), (3, 3)], "a fill rate for each step since the line before"


def test_a_step_that_compiles_is_left_out_of_speed_and_recompilations_are_in_the_log(tmp_path, monkeypatch, words):
    class Compiled:
        steps = 0

        def __init__(self, *, speaks: bool):
            assert speaks, "the rank that writes"

        def happened(self) -> bool:
            self.steps += 1
            return self.steps == 6

        def tags(self) -> dict[str, float]:
            return {RECOMPILATIONS: 2.0} if self.steps > 5 else {}

    monkeypatch.setattr(train, "Compilations", Compiled)
    assert train.main([*words, *TINY, "--training.steps", "7"]) == 0
    first, last = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert RECOMPILATIONS not in first and last[RECOMPILATIONS] == 2.0
    assert 6 in last["excluded_steps"] and not {5, 7} & set(last["excluded_steps"])
