import random

import pytest

from data import conditional_byte_entropy


def test_hand_computed_cases():
    assert conditional_byte_entropy(b"abababab") == 0.0
    # 8 pairs; 4 begin with "a", which b and c follow twice each (1 bit); b and c are always followed by a (0 bits)
    assert conditional_byte_entropy(b"abacabaca") == pytest.approx(4 / 8)


def test_independent_bytes_have_the_entropy_of_one():
    text = bytes(random.Random(0).choices(range(16), k=200_000))
    assert conditional_byte_entropy(text) == pytest.approx(4.0, abs=0.01)


def test_too_short():
    with pytest.raises(ValueError, match="two bytes"):
        conditional_byte_entropy(b"a")
