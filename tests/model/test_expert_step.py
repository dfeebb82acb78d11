import pytest
import torch

from config.schema import Moe
from model.balance import balances
from model.expert_step import ExpertStep
from tests.model.test_moe import backward, batch, counts, model_with


def step_of(model, moe: Moe, ranks: int = 1, all_reduce=lambda x: x) -> ExpertStep:
    return ExpertStep(model, moe, model.shape, total_steps=10, data_ranks=ranks, sum_over_batch=all_reduce)


def never(micro_batch) -> None:
    raise AssertionError("this rule needs no extra pass")


def biases(model) -> list[torch.Tensor]:
    return [b.bias.clone() for b in balances(model).values()]


@pytest.mark.parametrize("rule", ["bias_sign", "quantile"])
def test_a_step_that_is_dropped_leaves_no_trace(rule):
    keys = dict(balance=rule, quantile_preset="custom")  # the exact global quantile keeps all margins of a step
    found = []
    for dropped in (False, True):
        model = model_with(**keys)
        experts = step_of(model, Moe(**keys))
        if dropped:
            experts.begin(1, [None], never)
            backward(model, *batch(seed=3))
            experts.drop()
            assert not any(map(sum, counts(model))) and not any(b.any() for b in biases(model))
        experts.begin(1, [None], never)
        backward(model, *batch(seed=4))
        experts.end(1)
        found.append(biases(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and found[0][0].any()


def test_an_update_acts_on_the_sum_over_ranks():
    one, two = (model_with(balance="bias_sign") for _ in range(2))
    for seed in (1, 2):
        backward(one, *batch(seed=seed))
    backward(two, *batch(seed=1))
    other = model_with(balance="bias_sign")
    backward(other, *batch(seed=2))
    theirs = torch.tensor(counts(other))
    step_of(one, Moe(balance="bias_sign")).end(1)
    step_of(two, Moe(balance="bias_sign"), 2, lambda mine: mine + theirs).end(1)
    assert all(torch.equal(a, b) for a, b in zip(biases(one), biases(two), strict=True))


def test_the_exact_load_is_counted_before_the_step_and_apart_from_it():
    keys = dict(balance="global_aux_loss", f_source="exact")
    model = model_with(**keys)
    experts = step_of(model, Moe(**keys), ranks=2, all_reduce=lambda mine: 2 * mine)
    pieces = [batch(seed=seed)[0] for seed in (1, 2)]
    experts.begin(1, pieces, model.count_global)
    assert not any(map(sum, counts(model))), "the extra pass is not training"
    for balance in balances(model).values():
        assert int(balance.global_counts.sum()) == 2 * 2 * 128
        assert balance.coefficients[0] == pytest.approx(1e-2 / 4), "two micro-batches on each of two ranks"
    experts.begin(1, pieces[:1], model.count_global)
    experts.end(1)
    assert not any(b.global_counts.any() for b in balances(model).values())


def test_a_report_has_churn_from_the_second_time_on():
    model = model_with(balance="aux_loss")
    experts = step_of(model, Moe())
    backward(model, *batch())
    experts.end(1)
    first = experts.report(batch()[0], model)
    second = experts.report(batch(seed=9)[0], model)
    assert "moe/churn" not in first and second["moe/churn"] == 0.0, "always of the first batch"
    assert first["moe/max_violation"] == second["moe/max_violation"] > 0
    assert first["moe/aux_loss"] > 0 and second["moe/aux_loss"] == 0.0, "means start anew after each report"
    assert experts.loads.tolist() == [b.load.tolist() for b in balances(model).values()]


def test_a_rank_that_holds_some_of_the_layers_reports_all_of_them():
    """Pipeline stages: one holds layer 1, the other layer 2 and a dense one; each adds what the other has."""
    reports, steps = {}, {}
    for held in ("12", "1", "2"):
        model = model_with(balance="aux_loss", log_per_layer=True)
        backward(model, *batch())
        for name in {"0", "1", "2"} - set(held):
            if held != "12":
                delattr(model.layers, name)
        steps[held] = step_of(model, Moe(log_per_layer=True))
        steps[held].end(1)
        if held == "12":
            reports[held] = steps[held].report(batch()[0], model)
    theirs = iter([steps["2"]._of_all_layers(b, w, t) for b, w, t in (("load", 8, torch.int64), ("measured", 5, None))])
    steps["1"].sum_over_stages = lambda mine: mine + next(theirs, 0)
    assert steps["1"].report(None, lambda _: None) == reports["12"]
    assert torch.equal(steps["1"].loads, steps["12"].loads) and steps["1"].loads.any(1).all()
