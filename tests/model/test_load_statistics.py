import math

import pytest
import torch

from model.load_statistics import (
    RoutingProbe,
    dead_experts,
    effective_share,
    max_violation,
    moe_metrics,
    noise_violation,
    variation,
)
from tests.model.test_moe import backward, batch, model_with

CASES = {
    # counts of 8 experts, k = 2: MaxVio, CV, exp(entropy) / E, dead experts
    "uniform": ([4] * 8, 0.0, 0.0, 1.0, 0),
    "collapsed": ([16, 16, 0, 0, 0, 0, 0, 0], 3.0, math.sqrt(3.0), 0.25, 6),
    "half": ([8, 8, 8, 8, 0, 0, 0, 0], 1.0, 1.0, 0.5, 4),
    "nothing": ([0] * 8, 0.0, 0.0, 1 / 8, 8),
}


@pytest.mark.parametrize("case", CASES)
def test_hand_computed_cases(case):
    counts, violation, cv, share, dead = CASES[case]
    counts = torch.tensor(counts)
    assert float(max_violation(counts)) == pytest.approx(violation)
    assert float(variation(counts)) == pytest.approx(cv)
    assert float(effective_share(counts)) == pytest.approx(share)
    assert int(dead_experts(counts)) == dead


def test_statistics_can_fire_where_the_published_one_could_not():
    """var(share) of a total collapse of 8 experts top-2 is 0.054: a threshold of 0.3 is never reached."""
    collapsed = torch.tensor([500, 500, 0, 0, 0, 0, 0, 0])
    assert float((collapsed / collapsed.sum()).var()) == pytest.approx((1 / 2 - 1 / 8) / 7, rel=1e-3)
    assert float(max_violation(collapsed)) == 3.0 and int(dead_experts(collapsed)) == 6


@pytest.mark.parametrize("tokens, busiest", [(4096, 1.096), (8192, 1.070), (32_768, 1.034)])
def test_the_noise_floor_is_the_published_one(tokens, busiest):
    assert 1 + noise_violation(tokens, 64, 8) == pytest.approx(busiest, abs=0.006)


def test_metrics_are_of_the_last_step_and_at_most_ten():
    model = model_with(balance="aux_loss", z_loss_coeff=1e-3, capacity="score", capacity_factor=0.5)
    backward(model, *batch())
    balances = [model.layers[i].moe.balance for i in ("1", "2")]
    counts, measured = (torch.stack([getattr(b, name).clone() for b in balances]) for name in ("counts", "measured"))
    values = moe_metrics(counts, measured, [1, 2], capacity=True)
    assert len(values) <= 9, "churn is the tenth"
    assert values["moe/max_violation"] == pytest.approx(float(max_violation(counts).max()))
    assert values["moe/mean_violation"] == pytest.approx(float(max_violation(counts).mean()))
    assert 0.9 < values["moe/aux_loss"] < 4.0 and values["moe/z_loss"] > 0
    assert 0.0 < values["moe/router_entropy"] <= math.log(8) and 0.3 < values["moe/dropped"] < 1.0
    layered = moe_metrics(counts, measured, [1, 2], capacity=False, per_layer=True)
    assert "moe/dropped" not in layered
    assert layered["moe_layers/2/max_violation"] == pytest.approx(float(max_violation(counts[1])))


def test_churn_is_zero_for_the_same_weights_and_one_for_a_disjoint_choice():
    model = model_with(balance="bias_sign", gumbel_tau=1.0)
    probe = RoutingProbe(model, lambda: model(batch()[0]))
    assert probe.churn(lambda x: x) == {}
    assert probe.churn(lambda x: x) == {"moe/churn": 0.0}
    for layer in ("1", "2"):
        before = model.layers[layer].moe.balance.bias
        before[:2] += 10.0
    probe.churn(lambda x: x)
    for layer in ("1", "2"):
        bias = model.layers[layer].moe.balance.bias
        bias[:2] -= 20.0
        bias[4:6] += 10.0
    assert probe.churn(lambda x: x) == {"moe/churn": 1.0}
    assert model.training and not model.layers["1"].moe.balance.counts.any(), "a probe is not training"
