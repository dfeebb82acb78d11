"""Rates against a table computed by hand from torchtitan 0.2.2's formula."""

import math

import pytest
import torch

from config.schema import LRScheduler
from trainer.schedule import learning_rate_factor, set_learning_rate


def factors(steps: int, **keys) -> list[float]:
    return [learning_rate_factor(step, LRScheduler(**keys), steps) for step in range(steps)]


# Ten steps, warm-up 2, decay over the last 4 of 10. stable = 10 + 1 - 2 - 4 = 5 steps (2..6), then (step - 6) / 4.
TABLE = {
    "linear": [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25],
    "sqrt": [0.5, 1, 1, 1, 1, 1, 1, 0.5, 1 - math.sqrt(0.5), 1 - math.sqrt(0.75)],
    "cosine": [0.5, 1, 1, 1, 1, 1, 1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4],
}


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_warm_up_stable_decay(kind: str) -> None:
    assert factors(10, warmup_steps=2, decay_ratio=0.4, decay_type=kind) == pytest.approx(TABLE[kind])


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_minimum_scales_the_decay_and_not_the_warm_up(kind: str) -> None:
    expected = TABLE[kind][:2] + [0.1 + 0.9 * f for f in TABLE[kind][2:]]
    keys = {"warmup_steps": 2, "decay_ratio": 0.4, "min_lr_factor": 0.1}
    assert factors(10, decay_type=kind, **keys) == pytest.approx(expected)


def test_without_a_ratio_decay_follows_warm_up() -> None:
    # decay = 5 - 1 = 4 steps, stable = 1 (step 1), then (step - 1) / 4.
    assert factors(5, warmup_steps=1) == pytest.approx([1, 1, 0.75, 0.5, 0.25])


def test_no_warm_up_and_no_decay() -> None:
    assert factors(4, warmup_steps=0, decay_ratio=0.0) == [1, 1, 1, 1]


def test_first_and_last_step_move() -> None:
    for warmup in (0, 1, 7, 200):
        values = factors(40, warmup_steps=warmup)
        assert values[0] > 0 and values[-1] > 0


def test_warm_up_longer_than_the_run_is_shortened() -> None:
    assert factors(4, warmup_steps=200) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_decay_that_does_not_fit_is_shortened() -> None:
    assert factors(4, warmup_steps=2, decay_ratio=1.0) == pytest.approx([0.5, 1.0, 1.0, 0.5])


def test_rate_stays_at_the_minimum_past_the_schedule() -> None:
    section = LRScheduler(warmup_steps=0, total_steps=4, min_lr_factor=0.2)
    values = [learning_rate_factor(step, section, 8) for step in range(8)]
    assert values == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2])


def test_logged_rate_is_the_one_used() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    bias = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}], lr=123.0)
    section, expected = LRScheduler(warmup_steps=2, decay_ratio=0.4), 0.0
    for step in range(10):
        rate = set_learning_rate(optimizer, step, 0.1, section, 10)
        weight.grad, bias.grad = torch.ones(1), torch.ones(1)
        optimizer.step()
        expected -= 0.1 * TABLE["linear"][step]
        assert rate == pytest.approx(0.1 * TABLE["linear"][step])
        assert weight.item() == pytest.approx(expected) and bias.item() == pytest.approx(expected)
