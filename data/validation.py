"""The held-out documents as batches: the same tokens each time, whatever the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from data.batch import MicroBatch
from data.packing import Tape, collate, padding, window_count, windows


@dataclass
class Validation:
    """Iterable, any number of times, over this rank's micro-batches. Every rank has the same number of them.

    Windows of seq_len labels are dealt out as training samples are (data/loader.py). The last window of a source is
    filled up, and the last batch padded with whole rows, whose labels are all -100.
    """

    tapes: list[tuple[Tape, int | None]]
    """The held-out documents of each source and how many windows of it to take (None: all)."""
    seq_len: int
    local_batch_size: int
    dp_rank: int
    dp_degree: int
    eos_id: int
    token_bytes: np.ndarray
    document_mask: bool
    mask_boundary_labels: bool

    @property
    def windows(self) -> int:
        """Sequences evaluated by all ranks together."""
        counts = [(window_count(len(tape), self.seq_len), limit) for tape, limit in self.tapes]
        return sum(count if limit is None else min(count, limit) for count, limit in counts)

    def __len__(self) -> int:
        """Micro-batches of each rank."""
        return -(-self.windows // (self.local_batch_size * self.dp_degree))

    def __iter__(self) -> Iterator[MicroBatch]:
        of_each_source = (windows(tape, self.seq_len, limit, self.eos_id) for tape, limit in self.tapes)
        sequences = enumerate(chain.from_iterable(of_each_source))
        empty = padding(self.seq_len, self.eos_id)
        row = self.local_batch_size
        for _ in range(len(self)):
            batch = list(islice(sequences, row * self.dp_degree))[self.dp_rank * row : (self.dp_rank + 1) * row]
            batch += [(-1, empty)] * (row - len(batch))
            yield collate(
                [sequence for _, sequence in batch],
                [index for index, _ in batch],
                token_bytes=self.token_bytes,
                document_mask=self.document_mask,
                mask_boundary_labels=self.mask_boundary_labels,
            )
