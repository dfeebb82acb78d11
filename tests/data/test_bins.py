"""Packing of whole documents: against a naive packer, no token lost, and a step that is a function of its number."""

import random

import numpy as np
import pytest

from config.errors import ConfigError
from config.rules import check
from data.bins import PACKINGS, PackedEpochs, first_fit_decreasing, next_fit
from data.build import build_data
from data.packing import collate
from tests.data.test_loader import content, loader, mixture_of, steps
from tests.data.test_packing import EOS, store_of

NAMES = list(PACKINGS)


def source(packing, lengths=(4, 1, 9, 3, 6, 20, 2, 2), seq_len=7, seed=0):
    store = store_of(*lengths)
    return PackedEpochs(
        store, np.arange(len(lengths)), packing=packing, seq_len=seq_len, data_seed=seed, label="s", fill=EOS
    )


def naive(lengths, capacity, decreasing):
    """Bins as lists of pieces; ``decreasing``: first fit of sorted pieces, else next fit."""
    bins, room = [], []
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i]) if decreasing else range(len(lengths))
    for piece in order:
        choices = range(len(bins)) if decreasing else range(max(0, len(bins) - 1), len(bins))
        found = next((b for b in choices if room[b] >= lengths[piece]), None)
        if found is None:
            bins.append([])
            room.append(capacity)
            found = len(bins) - 1
        bins[found].append(piece)
        room[found] -= lengths[piece]
    return bins


@pytest.mark.parametrize("count", [1, 2, 3, 50, 257])
@pytest.mark.parametrize("decreasing", [False, True])
def test_bins_are_those_of_a_naive_packer(count, decreasing):
    lengths = random.Random(count).choices(range(1, 34), k=count)
    order, ends = (first_fit_decreasing if decreasing else next_fit)(np.array(lengths), 33)
    found = [order[a:b].tolist() for a, b in zip(ends[:-1], ends[1:], strict=True)]
    assert found == naive(lengths, 33, decreasing)


def test_first_fit_decreasing_packs_a_part_of_the_pieces_at_a_time(monkeypatch):
    monkeypatch.setattr("data.bins.PIECES", 8)
    lengths = np.array(random.Random(0).choices(range(1, 34), k=30))
    order, ends = first_fit_decreasing(lengths, 33)
    assert sorted(order.tolist()) == list(range(30)) and ends[-1] == 30
    assert all(lengths[order[a:b]].sum() <= 33 for a, b in zip(ends[:-1], ends[1:], strict=True))
    assert sorted(order[: ends[np.searchsorted(ends, 8)]].tolist()) == list(range(8))


@pytest.mark.parametrize("packing", NAMES)
def test_every_token_is_there_once_an_epoch_beside_the_ones_repeated_as_context(packing):
    sequences = source(packing)
    for epoch in range(3):
        first = sum(len(sequences.layout(e).order) for e in range(epoch))
        found = []
        for i in range(first, first + len(sequences.layout(epoch).order)):
            read = sequences.read(i)
            found += read.tokens[: read.counted + 1].tolist()
            assert (read.tokens[read.counted + 1 :] == EOS).all()
        store = store_of(4, 1, 9, 3, 6, 20, 2, 2)
        # documents of 10 and 21 tokens are cut after 7 and 14: those tokens begin the next piece too
        assert sorted(found) == sorted([*store.tokens.tolist(), 20 + 7, 50 + 7, 50 + 14])


@pytest.mark.parametrize("packing", NAMES)
def test_sequences_hold_whole_documents_and_padding_is_one_of_its_own(packing):
    sequences = source(packing)
    for i in range(60):
        read = sequences.read(i)
        assert read.tokens.shape == read.documents.shape == (8,)
        assert len(read.names) == read.documents[: read.counted + 1].max() + 1
        assert (read.documents[read.counted + 1 :] == len(read.names)).all()
        assert sequences.labels(i) == read.labels()
        if packing == "padded":
            assert len(read.names) == 1


def test_padding_has_no_labels_and_positions_of_its_own():
    read = source("next_fit", lengths=(2, 1)).read(0)  # 3 + 2 tokens of 8
    batch = collate([read], [0], token_bytes=np.ones(100, int), document_mask=True, mask_boundary_labels=False)
    assert (batch.labels[0] != -100).tolist() == [True] * 4 + [False] * 3
    assert batch.document_ids[0, 5:].tolist() == [2, 2] and batch.positions[0, 5:].tolist() == [0, 1]
    assert batch.text_bytes == 4


@pytest.mark.parametrize("packing", NAMES)
def test_random_access_equals_reading_in_order(packing):
    forwards = [source(packing).read(i).tokens.tolist() for i in range(40)]
    sequences = source(packing)
    assert [sequences.read(i).tokens.tolist() for i in reversed(range(40))][::-1] == forwards
    assert forwards != [source(packing, seed=1).read(i).tokens.tolist() for i in range(40)]
    first, second = (sequences.layout(epoch) for epoch in (0, 1))
    assert first.documents.tolist() != second.documents.tolist() and first.order.tolist() != second.order.tolist()


@pytest.mark.parametrize("packing", NAMES)
@pytest.mark.parametrize("mask", [False, True])
def test_a_step_is_the_same_on_every_mesh(make_config, tmp_path, packing, mask):
    config = make_config(
        data__packing=packing, data__document_mask=mask, data__mask_boundary_labels=mask, **mixture_of(tmp_path)
    )
    by_degree = {}
    for degree in (1, 2, 4):
        loaders = [loader(config, rank, degree) for rank in range(degree)]
        for _ in range(3):
            batches = [each.next_step() for each in loaders]
        ids = [(m.labels != -100).sum().item() for b in batches for m in b.micro_batches]
        assert {b.global_valid_tokens for b in batches} == {sum(ids)}
        assert len({b.fill_rate for b in batches}) == 1 and 0 < batches[0].fill_rate <= 1
        by_degree[degree] = ([content(batches[g % degree])[g // degree] for g in range(4)], sum(ids))
    assert by_degree[1] == by_degree[2] == by_degree[4]


@pytest.mark.parametrize("packing", NAMES)
def test_resume_continues_exactly(make_config, packing):
    config = make_config(data__packing=packing, data__prefetch_steps=2)
    whole = steps(loader(config), 40)  # several epochs
    running = loader(config)
    for stop in range(40):
        if stop in (0, 1, 17, 39):
            resumed = loader(config)
            resumed.load_state_dict(running.state_dict())
            assert content(resumed.next_step()) == whole[stop], stop
            resumed.close()
        running.next_step()
    running.close()


def test_fill_rates_are_in_order_and_validation_is_the_same_for_all(make_config):
    rates, held_out, hashes = {}, [], set()
    for packing in ("split_fill", *NAMES):
        pipeline = build_data(make_config(data__packing=packing, training__seq_len=256), dp_rank=0, dp_degree=1)
        batches = [pipeline.train.next_step() for _ in range(4)]
        rates[packing] = sum(batch.fill_rate for batch in batches) / 4
        held_out.append([m.tokens.tolist() for m in pipeline.validation()])
        hashes.add(pipeline.corpus_hash)
    assert rates["split_fill"] == 1 > rates["first_fit_decreasing"] > rates["next_fit"] > rates["padded"]
    assert all(each == held_out[0] for each in held_out) and len(hashes) == 1


def test_the_fill_rate_leaves_out_padding_and_nothing_else(make_config):
    pipeline = build_data(make_config(data__packing="padded", training__seq_len=256), dp_rank=0, dp_degree=1)
    batch = pipeline.train.next_step()
    read = [pipeline.train._sources[0].read(i) for i in batch.sample_ids]
    padding = sum(int((each.documents[:256] == len(each.names)).sum()) for each in read)
    assert batch.global_padding == padding > 0
    assert batch.fill_rate == 1 - padding / (256 * len(read))


@pytest.mark.parametrize("packing", NAMES)
def test_no_piece_is_without_a_target(packing):
    """Of documents that end where a sequence does: 8 and 15 tokens with eos, in sequences of 8."""
    assert sorted(source(packing, lengths=(7, 14)).layout(0).lengths.tolist()) == [8, 8, 8]


def test_a_state_of_another_packing_is_refused(make_config):
    state = loader(make_config(data__packing="padded")).state_dict()
    with pytest.raises(ConfigError, match="data.packing was 'padded', is 'next_fit'"):
        loader(make_config(data__packing="next_fit")).load_state_dict(state)


def test_epochs_count_sequences(make_config):
    """Padding makes an epoch longer: with a document a sequence, as many steps as documents allow."""
    config = make_config(data__packing="padded", training__seq_len=512, training__steps=30)
    pipeline = build_data(config, dp_rank=0, dp_degree=1)
    described = pipeline.describe()
    assert described["epochs"] == pytest.approx(30 * 8 / described["documents"])


def test_a_stream_is_refused(make_config):
    config = make_config(data__packing="next_fit", data__corpus="hf", data__name="somewhere")
    with pytest.raises(ConfigError, match="a stream is read in order"):
        check(config, {})
