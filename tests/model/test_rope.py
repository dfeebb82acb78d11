import math

import torch

from config.flavors import RopeScaling
from model.rope import apply_rope, rope_frequencies, rope_table


def test_rotation_equals_multiplication_by_a_complex_phase():
    frequencies = rope_frequencies(8, 10_000.0, None)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    out = apply_rope(x, rope_table(5, frequencies).double())
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.arange(5, dtype=torch.float64)[:, None] * frequencies.double()
    phase = torch.polar(torch.ones_like(angles), angles)
    expected = pairs * phase[:, None]
    torch.testing.assert_close(out, torch.cat([expected.real, expected.imag], dim=-1), rtol=1e-6, atol=1e-6)


def test_scores_depend_on_distance_alone():
    table = rope_table(64, rope_frequencies(16, 500_000.0, RopeScaling(factor=8.0)))
    q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)

    def score(i: int, j: int) -> float:
        return float((apply_rope(q, table[i : i + 1]) * apply_rope(k, table[j : j + 1])).sum())

    assert math.isclose(score(7, 3), score(44, 40), rel_tol=1e-4, abs_tol=1e-5)
    assert not math.isclose(score(7, 3), score(7, 4), rel_tol=1e-3)


def test_llama31_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    plain = rope_frequencies(128, 500_000.0, None)
    scaled = rope_frequencies(128, 500_000.0, RopeScaling(factor=8.0))
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 8192 / 4, wavelength > 8192 / 1
    torch.testing.assert_close(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)
    between = ~short & ~long
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_rows_given_by_position_equal_rows_in_order():
    table = rope_table(10, rope_frequencies(8, 10_000.0, None))
    x = torch.randn(2, 10, 2, 8)
    torch.testing.assert_close(apply_rope(x, table), apply_rope(x, table[torch.arange(10).expand(2, -1)]))
