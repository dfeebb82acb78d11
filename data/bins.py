"""Packing of whole documents: next_fit, first_fit_decreasing and padded. Any sequence can be read without reading those
before it.

A sequence holds S + 1 tokens. A document with more is cut into pieces; each piece begins with the last token of the one
before it, as windows of split_fill do, so every target has what precedes it, up to S tokens. The pieces of an epoch, in
an order drawn from (data_seed, epoch), are put into sequences ("bins"):

    padded                  one piece a sequence
    next_fit                in order; a piece that does not fit begins the next sequence
    first_fit_decreasing    the longest first, each into the first sequence with room (Johnson et al., SIAM J. Comput.
                            3, 1974: about 11/9 of the fewest sequences at most), PIECES at a time

and the sequences are shuffled, by (data_seed, epoch) again: neighbours in a batch are rarely pieces of one document.
What is left of a sequence is padding, a document of its own without labels. Where sequences hold several documents, the
token that a piece repeats may be a target twice, unless data.mask_boundary_labels leaves out all such targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data.packing import PackedSequence, permutation
from data.token_store import TokenStore

PIECES = 16_384
"""Pieces that first_fit_decreasing packs together: more would fill hardly better, and take more memory."""


@dataclass
class Layout:
    """An epoch: which piece is in which sequence."""

    documents: np.ndarray
    """(P,) int64 indices into the store, pieces of a sequence next to each other."""
    starts: np.ndarray
    """(P,) int64: where in its document each piece begins."""
    lengths: np.ndarray
    """(P,) int64."""
    ends: np.ndarray
    """(sequences + 1,) int64: sequence i holds pieces ends[i] .. ends[i + 1]."""
    order: np.ndarray
    """(sequences,) int64: the order in which they are read."""

    def pieces(self, place: int) -> slice:
        """Of the sequence that is read as the ``place``-th."""
        i = self.order[place]
        return slice(int(self.ends[i]), int(self.ends[i + 1]))


class PackedEpochs:
    """The training documents of a store, epoch after epoch, in sequences of whole documents; a SequenceSource."""

    def __init__(
        self,
        store: TokenStore,
        documents: np.ndarray,
        *,
        packing: str,
        seq_len: int,
        data_seed: int,
        label: str,
        fill: int,
    ) -> None:
        """
        Args:
            documents: (D,) int64 indices into the store; at least one.
            packing: one of the names above.
            label: sets this source's order apart from that of other sources with the same seed.
            fill: token of padding.
        """
        self._store, self._documents, self._packing = store, documents, packing
        self._seq_len, self._seed, self._label, self._fill = seq_len, data_seed, label, fill
        self._layouts: dict[int, Layout] = {}
        self._ends = [0]  # sequences up to the end of each epoch that was laid out
        self.tokens_per_epoch = int((store.offsets[documents + 1] - store.offsets[documents]).sum())

    def layout(self, epoch: int) -> Layout:
        """Of ``epoch`` (from 0). The last two are kept."""
        if epoch not in self._layouts:
            key = (self._label, self._seed, epoch)
            documents = self._documents[permutation(len(self._documents), "epoch", *key)]
            sizes = self._store.offsets[documents + 1] - self._store.offsets[documents]
            counts = np.maximum(1, -(-(sizes - 1) // self._seq_len))
            which = np.repeat(np.arange(len(documents)), counts)
            starts = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * self._seq_len
            lengths = np.minimum(sizes[which] - starts, self._seq_len + 1)
            inside, ends = PACKINGS[self._packing](lengths, self._seq_len + 1)
            order = permutation(len(ends) - 1, "sequences", *key)
            self._layouts = {e: kept for e, kept in self._layouts.items() if e == epoch - 1}
            self._layouts[epoch] = Layout(documents[which[inside]], starts[inside], lengths[inside], ends, order)
        return self._layouts[epoch]

    def locate(self, index: int) -> tuple[int, int]:
        """Epoch of sequence ``index``, and its place in it. Earlier epochs are laid out on the way, once."""
        while self._ends[-1] <= index:
            self._ends.append(self._ends[-1] + len(self.layout(len(self._ends) - 1).order))
        epoch = int(np.searchsorted(self._ends, index, side="right")) - 1
        return epoch, index - self._ends[epoch]

    def read(self, index: int) -> PackedSequence:
        epoch, place = self.locate(index)
        layout = self.layout(epoch)
        inside = layout.pieces(place)
        documents, lengths = layout.documents[inside], layout.lengths[inside]
        first = self._store.offsets[documents] + layout.starts[inside]
        found, length = int(lengths.sum()), self._seq_len + 1
        tokens = np.full(length, self._fill, dtype=np.int64)
        ids = np.full(length, len(documents), dtype=np.int32)  # padding is the document after the last
        tokens[:found] = np.concatenate(
            [self._store.tokens[a : a + n] for a, n in zip(first.tolist(), lengths.tolist(), strict=True)]
        )
        ids[:found] = np.repeat(np.arange(len(documents), dtype=np.int32), lengths)
        names = [self._store.names[int(d)] for d in documents]
        return PackedSequence(tokens, ids, names, counted=found - 1)

    def labels(self, index: int) -> tuple[int, int]:
        epoch, place = self.locate(index)
        layout = self.layout(epoch)
        inside = layout.pieces(place)
        return int(layout.lengths[inside].sum()) - 1, inside.stop - inside.start - 1

    def sequences_per_epoch(self) -> int:
        """Of the first epoch; with next_fit others have a few more or less."""
        return len(self.layout(0).order)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def padded(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces in the order in which sequences hold them, and the ends of the sequences among them: one each."""
    return np.arange(len(lengths)), np.arange(len(lengths) + 1)


def next_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """As :func:`padded`, for pieces put into the last sequence as long as they fit."""
    sums, ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)]), [0]
    while ends[-1] < len(lengths):
        ends.append(int(np.searchsorted(sums, sums[ends[-1]] + capacity, side="right")) - 1)
    return np.arange(len(lengths)), np.array(ends)


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """As :func:`padded`, for pieces put, the longest first, into the first sequence with room."""
    order: list[int] = []
    ends = [0]
    for first in range(0, len(lengths), PIECES):
        for held in _first_fit(lengths[first : first + PIECES], capacity):
            order += [first + piece for piece in held]
            ends.append(len(order))
    return np.array(order), np.array(ends)


def _first_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """The pieces of each sequence. A tree over sequences holds the most room under each node, so a piece takes
    log2(pieces) steps."""
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    held: list[list[int]] = []
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length, node = int(lengths[piece]), 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        if node - leaves == len(held):
            held.append([])
        held[node - leaves].append(piece)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return held


PACKINGS = {"padded": padded, "next_fit": next_fit, "first_fit_decreasing": first_fit_decreasing}
"""data.packing -> (lengths (P,), capacity) -> the pieces in order (P,), ends (sequences + 1,)."""
