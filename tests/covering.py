"""Pairwise covering arrays: few rows in which every two values of different factors meet.

Most faults of combined techniques need two of them. With all pairs met once, what a full product would find by two
factors is found with about as many rows as the two largest factors have pairs (Cohen et al., AETG, IEEE TSE 1997).
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, str]
"""Factor -> value."""
Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two (factor, value), in the order of the factors."""


def pairs(row: Row) -> set[Pair]:
    """The pairs that meet in ``row``."""
    return set(combinations(row.items(), 2))


def legal_rows(factors: Mapping[str, Sequence[str]], legal: Callable[[Row], bool]) -> list[Row]:
    """The full product without the rows that may not be, in its order."""
    rows = (dict(zip(factors, values, strict=True)) for values in product(*factors.values()))
    return [row for row in rows if legal(row)]


def covering_array(allowed: Sequence[Row]) -> list[Row]:
    """Rows out of ``allowed`` in which every pair meets that meets in any of them.

    Greedy: each row is the one with most pairs that are still missing, the first of several. The same for the same
    ``allowed``. A pair that no allowed row has is nothing that could be covered.
    """
    open_rows = [(pairs(row), row) for row in allowed]
    missing = set().union(*(found for found, _ in open_rows)) if open_rows else set()
    chosen = []
    while missing:
        best, row = max(open_rows, key=lambda each: len(each[0] & missing))
        missing -= best
        chosen.append(row)
    return chosen


def sample(rows: Sequence[Row], count: int, seed: int) -> list[Row]:
    """``count`` of ``rows``, the same for the same seed, in their order."""
    kept = set(random.Random(seed).sample(range(len(rows)), count))
    return [row for i, row in enumerate(rows) if i in kept]
