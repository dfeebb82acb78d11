import pytest
import torch

from config.errors import ConfigError
from generation.sampling import Sampling, choose

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.5, 0.7])


def frequencies(sampling: Sampling, draws: int = 20_000) -> torch.Tensor:
    """Share of each token over evenly spaced draws."""
    ids = choose(LOGITS.expand(draws, -1), sampling, (torch.arange(draws, dtype=torch.float64) + 0.5) / draws)
    return torch.bincount(ids, minlength=len(LOGITS)) / draws


@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    torch.testing.assert_close(
        frequencies(Sampling(temperature)), (LOGITS / temperature).softmax(0), atol=2e-4, rtol=0.0
    )


def test_top_k_keeps_k_and_their_proportions():
    kept = torch.where(torch.tensor([False, True, False, True, False]), LOGITS, -torch.inf).softmax(0)
    torch.testing.assert_close(frequencies(Sampling(top_k=2)), kept, atol=2e-4, rtol=0.0)
    assert frequencies(Sampling(top_k=99)).min() > 0


def test_top_p_keeps_the_fewest_that_hold_the_share():
    order = LOGITS.softmax(0).sort(descending=True)
    two = float(order.values[:2].sum())
    for share, count in ((1e-9, 1), (two - 1e-4, 2), (two + 1e-4, 3), (1.0, 5)):
        kept = frequencies(Sampling(top_p=share)) > 0
        assert set(kept.nonzero().flatten().tolist()) == set(order.indices[:count].tolist()), share


def test_top_p_is_taken_of_what_top_k_left():
    first, second = LOGITS.softmax(0).sort(descending=True).values[:2].tolist()
    among_two = first / (first + second)
    assert (frequencies(Sampling(top_k=2, top_p=among_two - 1e-4)) > 0).sum() == 1
    assert (frequencies(Sampling(top_p=among_two - 1e-4)) > 0).sum() > 1


def test_zero_temperature_is_the_most_likely_token_and_a_small_one_nearly():
    for sampling in (Sampling(0.0), Sampling(1e-6), Sampling(1e-300), Sampling(top_k=1)):
        assert frequencies(sampling, 50)[1] == 1.0


def test_the_largest_draw_is_a_token_that_is_kept():
    """Sums of float32 probabilities end below 1 or above; a draw next to 1 must not fall past the last token."""
    logits = torch.randn(64, 50_000, generator=torch.Generator().manual_seed(0)) * 3
    last = torch.full((64,), 1.0 - 2.0**-53, dtype=torch.float64)
    for sampling in (Sampling(), Sampling(top_k=7), Sampling(top_p=0.5)):
        ids = choose(logits, sampling, last)
        assert ((0 <= ids) & (ids < 50_000)).all()
        if sampling.top_k:
            assert (logits.gather(1, ids[:, None]) >= logits.topk(7).values[:, -1:]).all()


@pytest.mark.parametrize(
    "values, blamed",
    [
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_k": -1}, "--top_k -1"),
        ({"top_p": 0.0}, "--top_p 0.0"),
        ({"top_p": 1.1}, "--top_p 1.1"),
    ],
)
def test_values_out_of_range_are_refused(values, blamed):
    with pytest.raises(ConfigError, match=blamed):
        Sampling(**values)
