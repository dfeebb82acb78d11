import torch

from benchmarks.routing_check import check_model, judge
from tests.model.test_moe import SHAPE, batch, model_with


def test_verdicts_from_even_to_collapsed():
    assert judge(torch.full((64,), 1024), 8192, 8).verdict == "even"
    assert judge(torch.linspace(100, 1948, 64).round().long(), 8192, 8).verdict == "skewed"
    collapsed = judge(torch.tensor([8192] * 8 + [0] * 56), 8192, 8)
    assert collapsed.verdict == "collapsed" and collapsed.dead == 56 and collapsed.violation == 7.0


def test_a_fresh_router_spreads_gaussian_input_and_nothing_can_spread_zeros():
    found = check_model(model_with(balance="none"), batch()[0], 4096)
    assert found.keys() == {"gaussian", "real", "zero", "adversarial"}
    for layers in found.values():
        assert layers.keys() == {"1", "2"}
    assert all(load.verdict != "collapsed" for load in found["gaussian"].values())
    for name in ("zero", "adversarial"):
        for load in found[name].values():
            assert load.verdict == "collapsed" and load.dead == SHAPE.moe.num_experts - SHAPE.moe.top_k
