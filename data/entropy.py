"""The entropy a byte-bigram model would reach: a floor that a trained model has to get under."""

from __future__ import annotations

import numpy as np


def conditional_byte_entropy(text: bytes) -> float:
    """H(next byte | previous byte) of ``text`` in bits a byte, from its own counts.

    A model that only knows the previous byte cannot do better on this text, so held-out bits per byte below it show
    that longer context is used.

    Raises:
        ValueError: fewer than two bytes.
    """
    data = np.frombuffer(text, dtype=np.uint8)
    if len(data) < 2:
        raise ValueError(f"conditional_byte_entropy needs at least two bytes, got {len(data)}")
    pair_ids = data[:-1].astype(np.int64) * 256 + data[1:]
    pairs = np.bincount(pair_ids, minlength=256 * 256).reshape(256, 256).astype(np.float64)
    share_of_previous = pairs / np.maximum(pairs.sum(axis=1, keepdims=True), 1.0)
    seen = pairs > 0
    return float(-(pairs[seen] * np.log2(share_of_previous[seen])).sum() / pairs.sum())
