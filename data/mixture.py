"""Which source each sequence of a weighted mixture comes from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data.packing import permutation

BLOCK = 256


class Schedule:
    """Assigns global sample g (from 0) to a source, as a function of (weights, data_seed, g) alone.

    Up to any multiple of 256 samples each source has its share to within one sample for each source: the counts are
    closed-form, so any sample is found without replaying those before it. Within 256 samples the order is a
    permutation drawn from (data_seed, block), so that no source is tied to a rank or a row. A source is read in order.
    """

    def __init__(self, weights: Sequence[float], data_seed: int) -> None:
        """
        Args:
            weights: one a source, all > 0; their sum need not be 1.
        """
        self._seed = data_seed
        tails = np.cumsum(list(weights)[::-1])[::-1]
        # Share of source k among samples not taken by sources before it, in units of 2^-32: exact on every machine.
        self._shares = [int(round(w / tail * 2**32)) for w, tail in zip(weights, tails, strict=True)][:-1]
        self._block = -1
        self._choices = np.empty(0, dtype=np.int64)
        self._local = np.empty(0, dtype=np.int64)

    def counts(self, samples: np.ndarray) -> np.ndarray:
        """(K, n) int64: of the first ``samples`` (n,) low-discrepancy samples, how many each of K sources has.

        Each column sums to its entry of ``samples``, which must be below 2^31.
        """
        left = samples.astype(np.uint64)
        rows = []
        for share in self._shares:
            taken = (left * np.uint64(share) + np.uint64(2**31)) >> np.uint64(32)
            rows.append(taken)
            left = left - taken
        return np.stack([*rows, left]).astype(np.int64)

    def locate(self, sample: int) -> tuple[int, int]:
        """The source of global sample ``sample`` and its index within that source."""
        if not self._shares:
            return 0, sample
        block, place = divmod(sample, BLOCK)
        if block != self._block:
            counts = self.counts(np.arange(block * BLOCK, (block + 1) * BLOCK + 1))
            choices = np.argmax(np.diff(counts, axis=1), axis=0)[permutation(BLOCK, "mixture", self._seed, block)]
            self._local = np.empty(BLOCK, dtype=np.int64)
            for source in range(len(counts)):
                mine = choices == source
                self._local[mine] = counts[source, 0] + np.arange(mine.sum())
            self._choices, self._block = choices, block
        return int(self._choices[place]), int(self._local[place])
