import numpy as np
import pytest

from data.mixture import BLOCK, Schedule


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.2, 0.1], [5], [1, 3, 3, 1000], [0.001, 1.0]])
def test_every_source_is_read_in_order_without_gaps_at_its_share(weights):
    schedule = Schedule(weights, data_seed=3)
    located = [schedule.locate(g) for g in range(20 * BLOCK)]
    shares = np.array(weights) / sum(weights)
    for source, share in enumerate(shares):
        indices = [index for s, index in located if s == source]
        assert indices == list(range(len(indices)))
        assert abs(len(indices) - share * len(located)) <= len(weights)


def test_any_sample_is_found_without_those_before_it():
    schedule = Schedule([2, 1, 1], data_seed=0)
    in_order = [schedule.locate(g) for g in range(3 * BLOCK)]
    fresh = Schedule([2, 1, 1], data_seed=0)
    assert [fresh.locate(g) for g in reversed(range(3 * BLOCK))][::-1] == in_order
    source, index = fresh.locate(10**9)
    assert source in (0, 1, 2) and index > 10**8


def test_the_seed_decides_the_choice():
    def choices(seed: int) -> list[int]:
        schedule = Schedule([1, 1], seed)
        return [schedule.locate(g)[0] for g in range(64)]

    assert choices(0) == choices(0) != choices(1)


def test_no_source_is_tied_to_a_row():
    schedule = Schedule([1, 1], data_seed=0)
    even = sum(schedule.locate(g)[0] for g in range(0, 8 * BLOCK, 2)) / (4 * BLOCK)
    assert 0.4 < even < 0.6  # strict alternation would give 0 or 1
