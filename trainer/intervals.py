"""Sets of moments: sorted lists of (begin, end) that neither touch nor overlap, in any unit of time."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """All moments that are in any of ``intervals``, which may overlap and be in any order."""
    merged: list[Interval] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Moments that are in both sets."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Moments that are in ``a`` and not in ``b``."""
    found, j = [], 0
    for begin, end in a:
        while j < len(b) and b[j][1] <= begin:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if begin < b[k][0]:
                found.append((begin, b[k][0]))
            begin = max(begin, b[k][1])
            k += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(a: list[Interval]) -> float:
    """How long all of them last together."""
    return sum(end - begin for begin, end in a)
