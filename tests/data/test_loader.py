import hashlib
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from config.errors import ConfigError
from config.schema import Config
from data.batch import StepBatch
from data.build import build_data
from data.loader import TrainLoader
from tests.data.generated import generated_texts, write_jsonl

ASSETS = Path(__file__).parent / "assets"


def loader(config: Config, rank: int = 0, degree: int = 1) -> TrainLoader:
    return build_data(config, dp_rank=rank, dp_degree=degree).train


def content(batch: StepBatch) -> list[tuple]:
    """Everything a step holds, comparable with ==."""
    return [
        (
            m.tokens.tolist(),
            m.labels.tolist(),
            None if m.positions is None else m.positions.tolist(),
            None if m.document_ids is None else m.document_ids.tolist(),
            m.sample_ids,
            m.document_names,
            m.text_bytes,
        )
        for m in batch.micro_batches
    ]


def steps(source: TrainLoader, count: int) -> list[list[tuple]]:
    made = [content(source.next_step()) for _ in range(count)]
    source.close()
    return made


def mixture_of(tmp_path: Path, **changes) -> dict:
    for name in ("a", "b"):
        write_jsonl(tmp_path / name / "rows.jsonl", [f"{name} {text}" for text in generated_texts(80)])
    sources = [
        {"corpus": "text", "path": str(tmp_path / "a"), "weight": 3},
        {"corpus": "text", "path": str(tmp_path / "b"), "weight": 1.0},
    ]
    return {"data__corpus": "mixture", "data__sources": sources, **changes}


def test_frozen_text_gives_the_same_step_for_ever(make_config):
    """A version of numpy, torch or this code that changes what a step holds takes every old run its partner."""
    config = make_config(data__path=str(ASSETS), data__mask_boundary_labels=True, training__seq_len=128)
    source = loader(config)
    batches = [source.next_step() for _ in range(5)]  # more than an epoch
    text = b"".join(torch.cat([m.tokens, m.labels]).numpy().tobytes() for b in batches for m in b.micro_batches)
    assert hashlib.sha256(text).hexdigest() == "46e2f441a8212bc84a12b2e070cc9453ef77255cd6377aecec5171335c6a90b5"
    assert [b.global_valid_tokens for b in batches] == [1022, 1022, 1023, 1024, 1023]


@pytest.mark.parametrize("kind", ["text", "mixture"])
@pytest.mark.parametrize("mask", [False, True])
def test_a_step_is_the_same_on_every_mesh(make_config, tmp_path, kind, mask):
    changes = mixture_of(tmp_path) if kind == "mixture" else {}
    config = make_config(data__document_mask=mask, data__mask_boundary_labels=mask, **changes)
    for _ in range(3):
        by_degree = {}
        for degree in (1, 2, 4):
            batches = [loader(config, rank, degree).next_step() for rank in range(degree)]
            assert len({batch.global_valid_tokens for batch in batches}) == 1
            valid = sum(int((m.labels != -100).sum()) for batch in batches for m in batch.micro_batches)
            assert batches[0].global_valid_tokens == valid  # of all ranks, known to each
            assert batches[0].global_tokens == 8 * 64
            ids = [i for batch in batches for i in batch.sample_ids]
            assert sorted(ids) == list(range(8))  # no sample twice
            # micro-batch a of rank r is group a * degree + r of local_batch_size samples
            groups = [content(batches[g % degree])[g // degree] for g in range(4)]
            assert [g[4] for g in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]
            by_degree[degree] = (groups, valid)
        assert by_degree[1] == by_degree[2] == by_degree[4]
    assert (valid < 8 * 64) == mask


def test_steps_count_from_one_and_sample_ids_go_on(make_config):
    source = loader(make_config())
    batches = [source.next_step() for _ in range(3)]
    assert [batch.step for batch in batches] == [1, 2, 3]
    assert [i for batch in batches for i in batch.sample_ids] == list(range(24))
    assert batches[0].micro_batches[0].tokens.shape == (2, 64)


def test_the_second_epoch_differs_from_the_first(make_config):
    """Same tokens, another order: counted over a whole number of epochs, but for the windows at their edges."""
    pipeline = build_data(make_config(training__steps=100), dp_rank=0, dp_degree=1)
    epoch = pipeline.describe()["tokens"]
    tokens: list[int] = []
    while len(tokens) < 2 * epoch:
        tokens += torch.cat([m.tokens for m in pipeline.train.next_step().micro_batches]).flatten().tolist()
    first, second = tokens[:epoch], tokens[epoch : 2 * epoch]
    assert first != second
    differing = sum((Counter(first) - Counter(second)).values())
    assert differing < 0.05 * epoch + 4 * 64


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("kind", ["text", "mixture"])
def test_resume_continues_exactly_wherever_it_stopped(make_config, tmp_path, prefetch, kind):
    changes = mixture_of(tmp_path) if kind == "mixture" else {}
    config = make_config(data__prefetch_steps=prefetch, data__document_mask=True, **changes)
    whole = steps(loader(config), 70)  # several epochs
    running = loader(config)
    for stop in range(70):
        if stop in (0, 1, 7, 33, 69):
            resumed = loader(config)
            resumed.load_state_dict(running.state_dict())
            assert content(resumed.next_step()) == whole[stop], stop
            resumed.close()
        running.next_step()
    running.close()


def test_a_state_can_be_loaded_into_a_loader_that_has_run(make_config):
    config = make_config(data__prefetch_steps=2)
    source = loader(config)
    first = content(source.next_step())
    state = source.state_dict()
    second = content(source.next_step())
    source.load_state_dict(state)
    assert content(source.next_step()) == second != first
    source.close()


def test_resume_under_another_data_parallel_degree(make_config):
    config = make_config()
    one = loader(config)
    for _ in range(5):
        one.next_step()
    expected = content(one.next_step())
    two = [loader(config, rank, 2) for rank in range(2)]
    for source in two:
        for _ in range(5):
            source.next_step()
    resumed = [loader(config, rank, 4) for rank in range(4)]
    for source in resumed:
        source.load_state_dict(two[1].state_dict())
    assert [content(source.next_step())[0] for source in resumed] == expected


def test_a_state_of_other_data_is_refused(make_config):
    state = loader(make_config()).state_dict()
    with pytest.raises(ConfigError, match="debug.data_seed was 0, is 4; training.seq_len was 64, is 32"):
        loader(make_config(debug__data_seed=4, training__seq_len=32)).load_state_dict(state)
    with pytest.raises(ConfigError, match="corpus_hash was"):
        loader(make_config(data__holdout_percent=20.0)).load_state_dict(state)


def test_prefetching_never_changes_the_data(make_config):
    without = steps(loader(make_config()), 20)
    for prefetch in (1, 4):
        assert steps(loader(make_config(data__prefetch_steps=prefetch)), 20) == without


def test_the_data_seed_is_the_seed_unless_set(make_config):
    first = steps(loader(make_config(debug__seed=5)), 2)
    assert steps(loader(make_config(debug__data_seed=5)), 2) == first
    assert steps(loader(make_config(debug__seed=5, debug__data_seed=0)), 2) != first


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "data-prefetch"]


def test_an_error_in_the_background_is_raised_in_the_foreground(make_config, monkeypatch):
    source = loader(make_config(data__prefetch_steps=2))
    source.next_step()
    source.close()

    def broken(index: int):
        raise OSError("disk gone")

    monkeypatch.setattr(source._sources[0], "read", broken)
    for _ in range(2):  # also when asked again
        with pytest.raises(OSError, match="disk gone"):
            source.next_step()
    source.close()
    assert prefetch_threads() == []


def test_the_thread_ends_when_the_loader_is_closed_or_dropped(make_config):
    source = loader(make_config(data__prefetch_steps=2))
    source.next_step()
    assert len(prefetch_threads()) == 1
    source.close()
    assert prefetch_threads() == []
    dropped = loader(make_config(data__prefetch_steps=2))
    dropped.next_step()
    del dropped
    deadline = time.monotonic() + 60
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert prefetch_threads() == []


def test_a_global_batch_that_does_not_divide(make_config):
    with pytest.raises(ConfigError, match="global_batch_size = 8: not a multiple of .* 2 x 3 = 6"):
        loader(make_config(), degree=3)
    derived = make_config(training__global_batch_size=-1)
    assert loader(derived, degree=3).next_step().global_tokens == 2 * 3 * 64


@pytest.mark.gpu
def test_pinned_memory(make_config):
    config = make_config(data__prefetch_steps=1, data__document_mask=True)
    source = build_data(config, dp_rank=0, dp_degree=1, pin_memory=True).train
    micro_batch = source.next_step().micro_batches[0]
    assert micro_batch.tokens.is_pinned() and micro_batch.labels.is_pinned()
    assert micro_batch.positions is not None and micro_batch.positions.is_pinned()
    source.close()
