"""Sets of moments against sets of whole numbers, which need no cleverness."""

import random

from trainer.intervals import common, length, union, without


def moments(intervals):
    return {t for begin, end in intervals for t in range(begin, end)}


def test_union_joins_what_touches_and_drops_what_is_empty():
    assert union([(5, 7), (1, 3), (3, 4), (2, 3), (9, 9)]) == [(1, 4), (5, 7)]


def test_agrees_with_sets_on_random_intervals():
    random.seed(0)
    for _ in range(300):
        a, b = (
            [(begin, begin + random.randrange(6)) for begin in random.choices(range(30), k=random.randrange(8))]
            for _ in range(2)
        )
        x, y = union(a), union(b)
        assert moments(x) == moments(a) and length(x) == len(moments(a))
        assert moments(common(x, y)) == moments(a) & moments(b)
        assert moments(without(x, y)) == moments(a) - moments(b)
        for found in (x, common(x, y), without(x, y)):
            assert all(begin < end for begin, end in found)
            assert all(first[1] <= second[0] for first, second in zip(found, found[1:], strict=False))
