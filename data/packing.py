"""split_fill: documents end to end, cut every S tokens. Any sequence can be read without reading those before it.

The tape of an epoch is every training document once, each followed by eos, in an order drawn from (data_seed, epoch).
The tapes of all epochs lie end to end; window w is the S tokens from w * S and the one after them, so no token is
lost at the end of an epoch and none is padding. Sequence i is a window of its block of consecutive windows, in an order
drawn from (data_seed, block): neighbours in a batch are then rarely neighbours in a document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from data.batch import IGNORED, MicroBatch
from data.token_store import TokenStore


@dataclass
class PackedSequence:
    """S + 1 tokens: S inputs and, shifted by one, their S labels."""

    tokens: np.ndarray
    """(S + 1,) int64."""
    documents: np.ndarray
    """(S + 1,) int32: 0 for the first document in the sequence, then counting up."""
    names: list[str]
    """Name of each document in it."""
    counted: int
    """Labels that exist: S, less where the last tokens are padding."""

    def labels(self) -> tuple[int, int]:
        """Labels that exist, and how many of them are the first token of a document."""
        ids = self.documents[: self.counted + 1]
        return self.counted, int((ids[1:] != ids[:-1]).sum())


class SequenceSource(Protocol):
    """An endless, reproducible series of packed sequences."""

    def read(self, index: int) -> PackedSequence:
        """Sequence ``index``. A stream can only be read in order."""
        ...

    def labels(self, index: int) -> tuple[int, int]:
        """Labels of sequence ``index``, padding left out, and how many of them are the first token of a document. For a
        stream this is reading it."""
        ...

    def state(self) -> dict[str, Any]:
        """Where the source stands; empty if it can be read anywhere."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        ...


SHUFFLE_BLOCK = 4096
"""Windows that are shuffled together, where an epoch has as many."""


def permutation(count: int, *key: object) -> np.ndarray:
    """(count,) int64: an order of ``range(count)`` that depends on ``key`` alone.

    Sorted raw Philox output: numpy promises that stream, while ``Generator.permutation`` may change between versions.
    """
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:16], "little")
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")


class Tape:
    """Documents of a store in a given order, end to end, readable at any position."""

    def __init__(self, store: TokenStore, order: np.ndarray) -> None:
        self._store, self._order = store, order
        self._sources = store.offsets[order]
        self._ends = np.cumsum(store.offsets[order + 1] - self._sources)
        self._starts = np.concatenate([np.zeros(1, dtype=np.int64), self._ends[:-1]])

    def __len__(self) -> int:
        """Tokens on the tape."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def starts_before(self, position: int) -> int:
        """Documents that begin before ``position``."""
        return int(np.searchsorted(self._starts, position, side="left"))

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Tokens start..stop as int64, the ordinal (from 0) of the document each is in, and the documents' names."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop - 1, side="right")) + 1
        starts = np.maximum(self._starts[first:last], start)
        lengths = np.minimum(self._ends[first:last], stop) - starts
        where = np.repeat(self._sources[first:last] - self._starts[first:last], lengths) + np.arange(start, stop)
        ordinals = np.repeat(np.arange(last - first, dtype=np.int32), lengths)
        names = [self._store.names[int(d)] for d in self._order[first:last]]
        return self._store.tokens[where].astype(np.int64), ordinals, names


def join(pieces: list[tuple[np.ndarray, np.ndarray, list[str]]], length: int, fill: int = 0) -> PackedSequence:
    """One sequence of ``length`` = S + 1 tokens from consecutive reads; what is missing is ``fill`` and not counted.

    The fill belongs to the last document: its labels are ignored, and causal attention hides it from what comes before.
    """
    tokens: list[np.ndarray] = []
    documents: list[np.ndarray] = []
    names: list[str] = []
    for piece_tokens, ordinals, piece_names in pieces:
        tokens.append(piece_tokens)
        documents.append(ordinals + len(names))
        names += piece_names
    found = sum(len(t) for t in tokens)
    if found < length:
        tokens.append(np.full(length - found, fill, dtype=np.int64))
        documents.append(np.full(length - found, max(len(names) - 1, 0), dtype=np.int32))
    return PackedSequence(np.concatenate(tokens), np.concatenate(documents), names, counted=max(found - 1, 0))


class ShuffledEpochs:
    """The training documents of a store, epoch after epoch, each in its own order, and windows in blocks likewise."""

    def __init__(self, store: TokenStore, documents: np.ndarray, *, seq_len: int, data_seed: int, label: str) -> None:
        """
        Args:
            documents: (D,) int64 indices into the store; at least one.
            label: sets this source's order apart from that of other sources with the same seed.
        """
        self._store, self._documents = store, documents
        self._seq_len, self._seed, self._label = seq_len, data_seed, label
        self._tapes: dict[int, Tape] = {}
        self.tokens_per_epoch = int((store.offsets[documents + 1] - store.offsets[documents]).sum())
        # No longer than an epoch, so that a block lies across two tapes at most.
        self._block = max(1, min(SHUFFLE_BLOCK, self.tokens_per_epoch // seq_len))
        self._orders: dict[int, np.ndarray] = {}

    def window(self, index: int) -> int:
        """The window that sequence ``index`` is."""
        block, place = divmod(index, self._block)
        if block not in self._orders:
            self._orders = {block: permutation(self._block, "block", self._label, self._seed, block)}
        return block * self._block + int(self._orders[block][place])

    def tape(self, epoch: int) -> Tape:
        """The documents in the order of ``epoch`` (from 0). The last two are kept: a sequence may lie across both."""
        if epoch not in self._tapes:
            order = self._documents[permutation(len(self._documents), "epoch", self._label, self._seed, epoch)]
            self._tapes = {e: t for e, t in self._tapes.items() if e == epoch - 1}
            self._tapes[epoch] = Tape(self._store, order)
        return self._tapes[epoch]

    def read(self, index: int) -> PackedSequence:
        position = self.window(index) * self._seq_len
        stop = position + self._seq_len + 1
        pieces = []
        while position < stop:
            epoch, start = divmod(position, self.tokens_per_epoch)
            end = min(self.tokens_per_epoch, start + stop - position)
            pieces.append(self.tape(epoch).read(start, end))
            position += end - start
        return join(pieces, self._seq_len + 1)

    def labels(self, index: int) -> tuple[int, int]:
        first = self.window(index) * self._seq_len + 1
        return self._seq_len, self._starts_before(first + self._seq_len) - self._starts_before(first)

    def _starts_before(self, position: int) -> int:
        epoch, start = divmod(position, self.tokens_per_epoch)
        return epoch * len(self._documents) + self.tape(epoch).starts_before(start)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def windows(tape: Tape, seq_len: int, limit: int | None, fill: int) -> Iterator[PackedSequence]:
    """The tape once, cut as split_fill cuts it, at most ``limit`` sequences; the last may be partly ``fill``."""
    total = window_count(len(tape), seq_len)
    for index in range(total if limit is None else min(limit, total)):
        start = index * seq_len
        yield join([tape.read(start, min(start + seq_len + 1, len(tape)))], seq_len + 1, fill)


def window_count(tokens: int, seq_len: int) -> int:
    """Windows of ``seq_len`` labels that cover every token but the first."""
    return -(-max(tokens - 1, 0) // seq_len)


def padding(seq_len: int, fill: int) -> PackedSequence:
    """A sequence without a label, for ranks that have run out of windows."""
    return join([], seq_len + 1, fill)


def collate(
    sequences: list[PackedSequence],
    sample_ids: list[int],
    *,
    token_bytes: np.ndarray,
    document_mask: bool,
    mask_boundary_labels: bool,
) -> MicroBatch:
    """A micro-batch of B sequences, each of S + 1 tokens. ``token_bytes`` as in ``Tokenizer``."""
    tokens = np.stack([s.tokens for s in sequences])  # (B, S + 1)
    documents = np.stack([s.documents for s in sequences])
    labels = tokens[:, 1:].copy()
    place = np.arange(labels.shape[1])
    first_of_document = documents[:, 1:] != documents[:, :-1]
    ignored = place >= np.array([[s.counted] for s in sequences])
    if mask_boundary_labels:
        ignored |= first_of_document
    text_bytes = int(token_bytes[labels[~ignored]].sum())
    labels[ignored] = IGNORED
    positions = document_ids = document_starts = None
    if document_mask:
        begins = np.zeros_like(labels)
        begins[:, 1:] = np.where(first_of_document[:, :-1], place[1:], 0)
        positions = torch.from_numpy(place - np.maximum.accumulate(begins, axis=1))
        ids = documents[:, :-1].copy()
        most = 1 << max(3, int(ids.max()).bit_length())  # at least 8, and more than the last id
        starts = np.stack([np.searchsorted(row, np.arange(most)) for row in ids])
        document_ids, document_starts = torch.from_numpy(ids), torch.from_numpy(starts.astype(np.int32))
    return MicroBatch(
        tokens=torch.from_numpy(tokens[:, :-1].copy()),
        labels=torch.from_numpy(labels),
        positions=positions,
        document_ids=document_ids,
        document_starts=document_starts,
        sample_ids=sample_ids,
        document_names=list(dict.fromkeys(name for s in sequences for name in s.names)),
        text_bytes=text_bytes,
    )
