import numpy as np
import torch

from data.packing import ShuffledEpochs, Tape, collate, join, padding, permutation, window_count, windows
from data.token_store import TokenStore

EOS = 99


def store_of(*lengths: int) -> TokenStore:
    """Document d holds the tokens 10 d, 10 d + 1, ... and then eos."""
    documents = [np.append(10 * d + np.arange(n), EOS) for d, n in enumerate(lengths)]
    return TokenStore(
        tokens=np.concatenate(documents).astype(np.uint16),
        offsets=np.cumsum([0, *map(len, documents)]),
        hashes=np.arange(len(lengths), dtype=np.uint64),
        names=[f"doc{d}" for d in range(len(lengths))],
    )


def source(seq_len: int = 7, seed: int = 0, label: str = "s") -> ShuffledEpochs:
    store = store_of(4, 1, 9, 3, 6)
    return ShuffledEpochs(store, np.arange(5), seq_len=seq_len, data_seed=seed, label=label)


def labels_of(sequences: ShuffledEpochs, count: int) -> list[int]:
    return [int(t) for i in range(count) for t in sequences.read(i).tokens[1:]]


def test_a_tape_reads_any_span():
    tape = Tape(store_of(3, 2), np.array([1, 0]))
    whole = [10, 11, EOS, 0, 1, 2, EOS]
    assert len(tape) == 7
    for start in range(7):
        for stop in range(start + 1, 8):
            tokens, ordinals, names = tape.read(start, stop)
            assert tokens.tolist() == whole[start:stop]
            documents = [0, 0, 0, 1, 1, 1, 1][start:stop]
            assert ordinals.tolist() == [d - documents[0] for d in documents]
            assert names == ["doc1", "doc0"][documents[0] : documents[-1] + 1]


def in_window_order(sequences: ShuffledEpochs, count: int) -> list[np.ndarray]:
    """The first ``count`` sequences, a whole number of blocks, put back where they lie on the tape."""
    windows = [sequences.window(i) for i in range(count)]
    assert sorted(windows) == list(range(count))
    return [sequences.read(windows.index(w)).tokens for w in range(count)]


def test_no_token_is_lost_between_epochs():
    sequences = source()
    total = sequences.tokens_per_epoch
    assert total == 28
    ordered = in_window_order(sequences, 12)  # three epochs
    stream = [int(ordered[0][0]), *(int(t) for tokens in ordered for t in tokens[1:])]
    for epoch in range(3):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == sorted(store_of(4, 1, 9, 3, 6).tokens.tolist())


def test_neighbouring_windows_overlap_by_the_one_token_that_is_label_and_input():
    ordered = in_window_order(source(), 12)
    for this, following in zip(ordered, ordered[1:], strict=False):
        assert this[-1] == following[0]


def test_windows_are_shuffled_within_blocks_no_longer_than_an_epoch():
    sequences = source(seq_len=1)  # 28 windows an epoch
    blocks = [[sequences.window(i) for i in range(b * 28, (b + 1) * 28)] for b in range(3)]
    for b, block in enumerate(blocks):
        assert sorted(block) == list(range(b * 28, (b + 1) * 28))
        assert block != sorted(block)
    assert [w - 28 for w in blocks[1]] != blocks[0]
    assert sequences.window(5) == blocks[0][5]  # after another block was read


def test_each_epoch_has_its_own_order():
    sequences = source()
    orders = [tuple(sequences.tape(epoch).read(0, 28)[2]) for epoch in range(4)]
    assert len(set(orders)) > 1
    assert all(sorted(order) == [f"doc{d}" for d in range(5)] for order in orders)


def test_seed_and_label_change_the_order():
    first = labels_of(source(), 4)
    assert labels_of(source(), 4) == first
    assert labels_of(source(seed=1), 4) != first
    assert labels_of(source(label="other"), 4) != first


def test_a_sequence_longer_than_the_corpus_spans_epochs():
    sequence = source(seq_len=100).read(0)
    assert len(sequence.tokens) == 101 and len(sequence.names) >= 18


def test_random_access_equals_reading_in_order():
    forwards = [source().read(i).tokens.tolist() for i in range(20)]
    sequences = source()
    backwards = [sequences.read(i).tokens.tolist() for i in reversed(range(20))]
    assert backwards[::-1] == forwards


def test_boundaries_count_the_first_tokens_among_the_labels():
    sequences = source(seq_len=5)
    for i in range(30):
        documents = sequences.read(i).documents
        assert sequences.labels(i) == (5, int((documents[1:] != documents[:-1]).sum())), i


def test_permutation_is_stable_across_versions_and_complete():
    assert permutation(8, "golden", 1).tolist() == [3, 6, 4, 1, 2, 5, 7, 0]
    assert sorted(permutation(1000, "x")) == list(range(1000))


def batch(mask: bool, boundary: bool):
    tape = Tape(store_of(3, 2), np.array([0, 1]))  # 0 1 2 eos 10 11 eos
    token_bytes = np.zeros(100, dtype=np.int64)
    token_bytes[:50] = 1
    sequence = join([tape.read(0, 7)], 7)
    return collate([sequence], [5], token_bytes=token_bytes, document_mask=mask, mask_boundary_labels=boundary)


def test_labels_are_the_next_tokens():
    made = batch(mask=False, boundary=False)
    assert made.tokens.tolist() == [[0, 1, 2, EOS, 10, 11]]
    assert made.labels.tolist() == [[1, 2, EOS, 10, 11, EOS]]
    assert made.tokens.dtype == made.labels.dtype == torch.int64
    assert made.positions is None and made.document_ids is None
    assert made.text_bytes == 4 and made.sample_ids == [5] and made.document_names == ["doc0", "doc1"]


def test_boundary_labels_are_masked_and_only_they():
    made = batch(mask=False, boundary=True)
    assert made.labels.tolist() == [[1, 2, EOS, -100, 11, EOS]]
    assert made.text_bytes == 3


def test_document_mask_restarts_positions():
    made = batch(mask=True, boundary=False)
    assert made.labels.tolist() == [[1, 2, EOS, 10, 11, EOS]]
    assert made.positions is not None and made.positions.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert made.document_ids is not None and made.document_ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    assert made.positions.dtype == torch.int64 and made.document_ids.dtype == torch.int32
    assert made.document_starts is not None and made.document_starts.tolist() == [[0, 4, 6, 6, 6, 6, 6, 6]]
    assert made.document_starts.dtype == torch.int32


def test_windows_cover_every_token_but_the_first_once():
    tape = Tape(store_of(4, 1, 9, 3, 6), np.arange(5))
    for seq_len in (1, 3, 7, 9, 27, 28, 50):
        found = list(windows(tape, seq_len, None, EOS))
        assert len(found) == window_count(28, seq_len)
        labels = np.concatenate([w.tokens[1 : 1 + w.counted] for w in found])
        assert labels.tolist() == tape.read(0, 28)[0][1:].tolist()
        assert all(len(w.tokens) == seq_len + 1 for w in found)
    assert len(list(windows(tape, 3, 2, EOS))) == 2


def test_padding_has_no_label():
    made = collate(
        [padding(4, EOS)], [-1], token_bytes=np.ones(100, int), document_mask=True, mask_boundary_labels=True
    )
    assert made.labels.tolist() == [[-100] * 4] and made.tokens.tolist() == [[EOS] * 4]
    assert made.text_bytes == 0 and made.document_names == []
