import math

import pytest
import torch

from config.schema import Moe
from config.shapes import MoEShape
from model.noise import noise_key
from model.router import Router, drop_overflow, expert_capacity, limit_to_groups

DIM = 32
KEY = torch.tensor(noise_key(0, "layers.0.moe"))


def make(shape: MoEShape, moe: Moe | None = None, **config) -> Router:
    router = Router(DIM, shape, moe or Moe(balance="none", **config))
    with torch.no_grad():
        router.gate.weight.copy_(torch.randn(shape.num_experts, DIM, generator=torch.Generator().manual_seed(0)) * 0.3)
    return router


def route(router: Router, x: torch.Tensor, bias=None, tau=0.0, numbers=None, valid=None, choose_by="score"):
    numbers = torch.arange(len(x)) if numbers is None else numbers
    valid = torch.ones(len(x), dtype=torch.bool) if valid is None else valid
    return router(x, numbers, valid, KEY, torch.tensor(tau), bias, choose_by)


def slow(router: Router, x: torch.Tensor, bias=None):
    """The choice and the weights, token by token in float64."""
    shape, answers = router.shape, []
    for row in x.double():
        logits = [float(row @ w) for w in router.gate.weight.detach().double()]
        if shape.score_func == "softmax":
            top = max(logits)
            total = sum(math.exp(v - top) for v in logits)
            scores = [math.exp(v - top) / total for v in logits]
        else:
            scores = [1 / (1 + math.exp(-v)) for v in logits]
        choice = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
        allowed = range(shape.num_experts)
        if shape.num_groups > 1:
            size = shape.num_experts // shape.num_groups
            worth = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(shape.num_groups)]
            best = sorted(range(shape.num_groups), key=lambda g: -worth[g])[: shape.top_groups]
            allowed = [e for e in allowed if e // size in best]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: shape.top_k]
        weight = {e: scores[e] for e in chosen}
        if shape.route_norm:
            total = sum(weight.values())
            weight = {e: w / total for e, w in weight.items()}
        answers.append({e: w * shape.route_scale for e, w in weight.items()})
    return answers


SHAPES = [
    MoEShape(8, 2, 4),
    MoEShape(8, 3, 4, route_norm=True),
    MoEShape(8, 2, 4, score_func="sigmoid", route_norm=True, route_scale=2.5),
    MoEShape(12, 3, 4, score_func="sigmoid", num_groups=4, top_groups=2),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_choice_and_weights_equal_a_slow_reference(shape, biased):
    router, x = make(shape), torch.randn(50, DIM)
    bias = torch.randn(shape.num_experts, generator=torch.Generator().manual_seed(1)) * 0.2 if biased else None
    found = route(router, x, bias)
    for token, expected in enumerate(slow(router, x, bias)):
        mine = dict(zip(found.experts[token].tolist(), found.weights[token].tolist(), strict=True))
        assert mine.keys() == expected.keys()
        assert all(abs(mine[e] - expected[e]) < 1e-5 for e in expected)
        assert found.requested[token].nonzero().flatten().tolist() == sorted(expected)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_weight_mass_is_one_for_a_renormalised_router(score_func):
    found = route(make(MoEShape(64, 8, 4, score_func=score_func, route_norm=True)), torch.randn(100, DIM))
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(100))


def test_balance_losses_see_sigmoid_scores_normalised_over_all_experts():
    router, x = make(MoEShape(8, 2, 4, score_func="sigmoid")), torch.randn(20, DIM)
    scores = (x.double() @ router.gate.weight.double().T).sigmoid()
    expected = (scores / scores.sum(-1, keepdim=True)).float()
    torch.testing.assert_close(route(router, x).probabilities, expected)


def test_bias_moves_the_choice_and_never_the_weights():
    shape = MoEShape(8, 2, 4, score_func="sigmoid")
    router, x = make(shape), torch.randn(200, DIM)
    bias = torch.zeros(8)
    bias[5] = 10.0
    found = route(router, x, bias)
    assert (found.experts == 5).any(-1).all()
    scores = (x @ router.gate.weight.T).sigmoid()
    torch.testing.assert_close(found.weights, scores.gather(1, found.experts))
    assert found.weights.max() <= 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_router_keeps_its_dtype_under_autocast(dtype):
    router, x = make(MoEShape(8, 2, 4), router_dtype=dtype), torch.randn(64, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        found = route(router, x)
    exact = x.double() @ router.gate.weight.double().T
    error = float((found.logits - exact).abs().max())
    assert error < 1e-5 if dtype == "float32" else 1e-4 < error < 0.1


def test_capacity_is_a_bound_and_drops_the_later_or_the_lighter():
    experts = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 3]])
    weights = torch.tensor([[0.1, 0.9], [0.4, 0.6], [0.8, 0.2], [0.3, 0.7]])
    ids, kept = drop_overflow(experts, weights, 4, 2, "position")
    assert ids.tolist() == [[0, 1], [0, 2], [4, 1], [4, 3]] and kept[2].tolist() == pytest.approx([0.0, 0.2])
    ids, kept = drop_overflow(experts, weights, 4, 2, "score")
    assert ids.tolist() == [[4, 1], [0, 2], [0, 1], [4, 3]] and kept[0].tolist() == pytest.approx([0.0, 0.9])
    assert expert_capacity(100, 2, 8, 1.25) == math.ceil(1.25 * 100 * 2 / 8)


@pytest.mark.parametrize("by", ["position", "score"])
def test_requested_and_kept_differ_by_what_was_dropped(by):
    shape = MoEShape(8, 2, 4)
    router = make(shape, Moe(balance="none", capacity=by, capacity_factor=1.0))
    x = torch.randn(64, DIM) + 2 * router.gate.weight.detach()[3]  # everyone wants expert 3
    found = route(router, x)
    kept = torch.bincount(found.experts.flatten(), minlength=9)[:8]
    assert int(found.requested.sum()) == 128 and int(found.requested[:, 3].sum()) > 40
    assert int(kept.max()) == 16 and int(kept.sum()) < 128
    assert router.max_rows(64) == 128 and bool((found.weights[found.experts == 8] == 0).all())


def test_groups_keep_the_two_best_of_each_group():
    choice = torch.tensor([[1.0, 0.0, 0.6, 0.6, 0.9, 0.0]])
    assert limit_to_groups(choice, 3, 1).isfinite().tolist() == [[False, False, True, True, False, False]]


def test_forced_uniform_is_exact_and_knows_no_micro_batches():
    router = make(MoEShape(8, 2, 4), Moe(balance="forced_uniform"))
    x = torch.randn(64, DIM)
    found = route(router, x)
    assert torch.bincount(found.experts.flatten(), minlength=8).tolist() == [16] * 8
    split = torch.cat(
        [
            route(router, x[:32], numbers=torch.arange(32)).experts,
            route(router, x[32:], numbers=torch.arange(32, 64)).experts,
        ]
    )
    assert torch.equal(found.experts, split)
    scores = (x @ router.gate.weight.T).softmax(-1)
    torch.testing.assert_close(found.weights, scores.gather(1, found.experts))


def test_random_logits_pass_the_gradient_through():
    router = make(MoEShape(8, 2, 4), Moe(balance="random_logits"))
    x = torch.randn(4000, DIM)
    found = route(router, x)
    assert float(found.requested.sum(0).float().std() / 1000) < 0.05
    assert abs(float(found.logits.mean())) < 0.02 and abs(float(found.logits.std()) - 1) < 0.02
    found.weights.square().sum().backward()
    assert router.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("strength, busiest", [(0.1, 1.42), (0.5, 3.67), (2.0, 7.70)])
def test_skew_ladder(strength, busiest):
    """Fixed Gaussian bias on unit normal logits, 8192 tokens, 64 experts, top-8. One draw of 64 numbers: wide bands."""
    router = Router(64, MoEShape(64, 8, 4), Moe(balance="forced_skew", skew_strength=strength))
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(64))
    x = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0))
    requested = route(router, x).requested
    load = requested.sum(0)
    assert abs(float(load.max() / load.float().mean()) / busiest - 1) < 0.3
    assert torch.equal(route(router, x[:10], numbers=torch.arange(10) + 999).requested, requested[:10]), (
        "the skew is fixed"
    )


def test_gumbel_samples_the_softmax_and_leaves_weights_alone():
    shape = MoEShape(4, 1, 4)
    router = make(shape, Moe(balance="none", gumbel_tau=1.0))
    x = torch.randn(1, DIM).expand(40_000, DIM)
    found = route(router, x, tau=1.0)
    expected = (x[0] @ router.gate.weight.T).softmax(-1)
    share = torch.bincount(found.experts.flatten(), minlength=4) / 40_000
    torch.testing.assert_close(share, expected.detach(), atol=0.01, rtol=0)
    torch.testing.assert_close(found.weights.flatten(), expected[found.experts.flatten()])
    router.eval()
    assert route(router, x, tau=1.0).experts.unique().numel() == 1, "no noise in evaluation"


def test_jitter_is_counter_based_and_for_training_only():
    router = make(MoEShape(8, 2, 4), Moe(balance="none", jitter=0.1))
    x = torch.randn(32, DIM)
    noisy = route(router, x).logits
    assert torch.equal(noisy, route(router, x).logits)
    assert torch.equal(noisy[16:], route(router, x[16:], numbers=torch.arange(16, 32)).logits)
    assert not torch.equal(noisy, route(router, x, numbers=torch.arange(32) + 1000).logits)
    router.eval()
    exact = route(router, x).logits
    assert 0 < float((noisy - exact).abs().max()) and torch.allclose(exact, x @ router.gate.weight.T)


def test_expert_choice_fills_every_expert_and_skips_padding():
    router = make(MoEShape(8, 2, 4), Moe(balance="none", routing="expert_choice"))
    x, valid = torch.randn(64, DIM), torch.arange(64) < 48
    found = route(router, x, valid=valid)
    assert found.requested.sum(0).tolist() == [16] * 8 and not found.requested[48:].any()
    scores = (x @ router.gate.weight.T).softmax(-1).masked_fill(~valid[:, None], -1)
    for expert in range(8):
        best = set(scores[:, expert].topk(16).indices.tolist())
        assert set(found.requested[:, expert].nonzero().flatten().tolist()) == best
    assert router.max_rows(64) == 128
