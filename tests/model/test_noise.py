import math

import torch

from model.noise import gumbel, mix, noise_key, normal, uniform

KEY = torch.tensor(noise_key(3, "layers.0.moe"))


def test_a_number_depends_on_its_row_and_on_nothing_else():
    rows = torch.arange(1000, 1064)
    whole = uniform(KEY, 1, rows, 8)
    halves = torch.cat([uniform(KEY, 1, rows[:20], 8), uniform(KEY, 1, rows[20:], 8)])
    assert torch.equal(whole, halves)
    torch.manual_seed(123)
    assert torch.equal(whole, uniform(KEY, 1, rows, 8))


def test_seed_layer_purpose_row_and_column_all_matter():
    rows = torch.arange(4096)
    base = uniform(KEY, 1, rows, 2)
    others = [
        uniform(torch.tensor(noise_key(4, "layers.0.moe")), 1, rows, 2),
        uniform(torch.tensor(noise_key(3, "layers.1.moe")), 1, rows, 2),
        uniform(KEY, 2, rows, 2),
        uniform(KEY, 1, rows + 1, 2),
        uniform(KEY, 1, rows + (1 << 40), 2),
        base.flip(1),
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([base[:, 0], other[:, 0]]))[0, 1])) < 0.06


def test_mix_is_a_bijection_on_a_sample_and_stays_in_32_bits():
    words = torch.arange(1 << 16) * 65_521 & 0xFFFFFFFF
    mixed = mix(words)
    assert mixed.unique().numel() == words.unique().numel()
    assert int(mixed.min()) >= 0 and int(mixed.max()) < 1 << 32


def test_moments():
    rows = torch.arange(200_000)
    u = uniform(KEY, 1, rows, 1).double()
    assert 0.0 < float(u.min()) and float(u.max()) < 1.0
    assert abs(float(u.mean()) - 0.5) < 0.003 and abs(float(u.var()) - 1 / 12) < 0.001
    g = gumbel(KEY, 1, rows, 1).double()
    assert abs(float(g.mean()) - 0.5772) < 0.01 and abs(float(g.var()) - math.pi**2 / 6) < 0.03
    n = normal(KEY, 1, rows, 1).double()
    assert abs(float(n.mean())) < 0.01 and abs(float(n.var()) - 1.0) < 0.01 and torch.isfinite(n).all()


def test_compiled_noise_is_the_same_noise():
    rows = torch.arange(257)
    compiled = torch.compile(uniform, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(KEY, 1, rows, 5), uniform(KEY, 1, rows, 5))
