import pytest
import torch

from config.schema import Moe
from config.shapes import MoEShape
from model.balance import Balance, Observation, bias_step, decayed
from model.router import Router

SHAPE = MoEShape(num_experts=8, top_k=2, hidden_dim=4)


def seen(counts: list[int] | torch.Tensor, margins=None) -> Observation:
    counts = torch.as_tensor(counts)
    return Observation(counts, counts, counts.sum() // 2, torch.zeros(4), torch.zeros(0, 2, dtype=torch.int64), margins)


def balance_with(**keys) -> Balance:
    return Balance(SHAPE, Moe(**keys), noise_seed=0, layer=0)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.type(torch.float16)])
def test_counts_are_exact_after_a_cast_and_300_micro_batches(cast):
    model = torch.nn.ModuleDict({"moe": balance_with(balance="bias_sign"), "other": torch.nn.Linear(2, 2)})
    model["moe"].bias.fill_(0.1001)
    cast(model)
    balance = model["moe"]
    assert model["other"].weight.dtype != torch.float32, "the cast did something"
    assert balance.counts.dtype == torch.int64 and balance.bias.dtype == torch.float32
    assert bool((balance.bias == torch.tensor(0.1001)).all())
    counts = torch.tensor([3, 1, 7, 0, 2, 1, 1, 1])
    for _ in range(300):
        balance.count(seen(counts))
    assert torch.equal(balance.counts, 300 * counts)


def test_bfloat16_counts_reproduce_the_published_bug():
    balance = balance_with(count_dtype="bfloat16")
    for _ in range(1000):
        balance.count(seen([1, 0, 0, 0, 0, 0, 0, 0]))
    assert float(balance.counts[0]) == 256.0, "a count of ones sticks where bfloat16's spacing is two"


def test_moving_and_emptying_keep_working():
    balance = balance_with(balance="quantile").to("meta")
    assert balance.counts.is_meta and balance.bias.dtype == torch.float32
    balance.to_empty(device="cpu")
    balance.reset()
    assert not balance.bias.any() and torch.equal(balance.noise_key, torch.tensor(balance.key))


@pytest.mark.parametrize("rule", ["bias_sign", "bias_proportional"])
def test_bias_rules_equal_a_slow_reference(rule):
    counts = [10, 0, 3, 4, 4, 5, 2, 4]
    mean, u = sum(counts) / 8, 0.01
    raw = [u * ((mean > c) - (mean < c)) if rule == "bias_sign" else u * (mean - c) / mean for c in counts]
    expected = torch.tensor([r - sum(raw) / 8 for r in raw])
    torch.testing.assert_close(bias_step(torch.tensor(counts), rule, u), expected)
    balance = balance_with(balance=rule, bias_update_rate=u)
    for step in (1, 2):
        balance.count(seen(counts))
        balance.update(step, balance.counts, same)
    torch.testing.assert_close(balance.bias, 2 * expected)
    assert not balance.counts.any() and torch.equal(balance.load, torch.tensor(counts))
    assert abs(float(balance.bias.sum())) < 1e-7


def test_the_bias_freezes():
    balance = balance_with(balance="bias_sign", bias_freeze_step=2)
    history = []
    for step in (1, 2, 3):
        balance.count(seen([9, 1, 1, 1, 1, 1, 1, 1]))
        balance.update(step, balance.counts, same)
        history.append(balance.bias.clone())
    assert not torch.equal(history[0], history[1]) and torch.equal(history[1], history[2])


def test_the_quantile_keeps_the_share_of_the_old_bias_it_is_told_to():
    balance = balance_with(balance="quantile", quantile_preset="megatron", quantile_ema=0.75)
    old, new = torch.linspace(0.3, -0.3, 8), torch.linspace(-1, 1, 8)
    balance.bias.copy_(old)
    balance.count(seen([2] * 8, new))
    balance.update(1, balance.counts.clone(), same)
    torch.testing.assert_close(balance.bias, 0.75 * old + 0.25 * new)


def test_a_step_without_tokens_changes_nothing():
    for rule in ("bias_sign", "bias_proportional", "quantile"):
        balance = balance_with(balance=rule)
        balance.count(
            seen([9, 1, 1, 1, 1, 1, 1, 1], torch.zeros_like(balance.quantile_sum) if rule == "quantile" else None)
        )
        balance.update(1, balance.counts.clone(), same)
        before = balance.bias.clone()
        balance.update(2, balance.counts.clone(), same)
        assert torch.equal(balance.bias, before) and int(balance.load[0]) == 9


def test_state_is_saved_and_restored_and_this_steps_counts_are_not():
    balance = balance_with(balance="bias_sign")
    assert set(balance.state_dict()) == {"bias"}
    assert set(balance_with(balance="global_aux_loss", f_source="previous_step").state_dict()) == {"previous_counts"}
    assert set(balance_with(balance="quantile").state_dict()) == {"bias"} and not balance_with().state_dict()
    balance.count(seen([9, 1, 1, 1, 1, 1, 1, 1]))
    balance.update(1, balance.counts, same)
    other = balance_with(balance="bias_sign")
    other.load_state_dict(balance.state_dict())
    assert torch.equal(other.bias, balance.bias) and other.bias.dtype == torch.float32


def test_previous_step_counts_are_the_last_steps():
    balance = balance_with(balance="global_aux_loss", f_source="previous_step")
    for step, counts in enumerate(([9, 1, 1, 1, 1, 1, 1, 1], [2] * 8), start=1):
        balance.count(seen(counts))
        balance.update(step, balance.counts.clone(), same)
        assert balance.previous_counts.tolist() == counts


def test_ranks_reach_the_same_bias_as_one_process():
    counts = torch.tensor([[9, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 16]])
    one, two = balance_with(balance="bias_sign"), balance_with(balance="bias_sign")
    for c in counts:
        one.count(seen(c))
    one.update(1, one.counts, same)
    two.count(seen(counts[0]))
    two.update(1, two.counts + counts[1], same)
    assert torch.equal(one.bias, two.bias)


def test_schedules():
    assert decayed("constant", 50, 100, 0.0) == 1.0
    assert [decayed("linear", s, 11, 0.5) for s in (1, 6, 11, 99)] == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert [decayed("cosine", s, 11, 0.0) for s in (1, 6, 11)] == pytest.approx([1.0, 0.5, 0.0])
    balance = balance_with(
        balance="aux_loss",
        aux_loss_coeff=0.1,
        z_loss_coeff=0.01,
        coeff_decay="linear",
        gumbel_tau=2.0,
        gumbel_decay_steps=11,
    )
    balance.set_step(6, total_steps=11, balance_groups=4)
    assert balance.coefficients.tolist() == pytest.approx([0.1 * 0.5 / 4, 0.01 * 0.5 / 4, 1.0])
    beside = balance_with(balance="bias_sign", extra_sequence_coeff=1e-4)
    assert beside.coefficients[0].item() == pytest.approx(1e-4)


CONTROLLERS = [
    # rule, keys, steps, share of the first step's MaxVio that is left then
    ("bias_sign", {"bias_update_rate": 1e-3}, 30, (0.8, 1.0)),
    ("bias_sign", {"bias_update_rate": 1e-2}, 80, (0.0, 0.2)),
    ("bias_proportional", {"bias_update_rate": 1e-3}, 60, (0.1, 0.6)),
    ("quantile", {"quantile_preset": "kimi_k3"}, 6, (0.0, 0.1)),
    ("quantile", {"quantile_preset": "megatron"}, 6, (0.0, 0.1)),
    ("quantile", {"quantile_preset": "custom", "quantile_estimator": "exact"}, 6, (0.0, 0.1)),
]


@pytest.mark.parametrize("rule, keys, steps, band", CONTROLLERS)
def test_controllers_act_as_fast_as_published(rule, keys, steps, band):
    """A frozen sigmoid router with logit offsets of std 1: how unbalanced it still is after some steps."""
    shape, tokens = MoEShape(64, 8, 4, score_func="sigmoid"), 1024
    moe = Moe(balance=rule, **keys)
    router, balance = Router(64, shape, moe), Balance(shape, moe, 0, 0)
    offsets = torch.randn(64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(64))
    valid, generator = torch.ones(1, tokens, dtype=torch.bool), torch.Generator().manual_seed(4)
    violations = []
    for step in range(1, steps + 1):
        x = torch.randn(tokens, 64, generator=generator) + offsets
        with torch.no_grad():
            routing = router(
                x, torch.arange(tokens), valid[0], balance.noise_key, torch.tensor(0.0), balance.bias, balance.choose_by
            )
            _, observation = balance.observe(routing, valid, None)
        balance.count(observation)
        balance.update(step, balance.counts.clone(), same)
        violations.append(float(balance.load.max() * 64 / (tokens * 8) - 1))
    assert violations[0] > 4.0
    assert band[0] <= violations[-1] / violations[0] <= band[1]
