"""What balance and z-losses add to a router's gradient, against autograd."""

import pytest
import torch

from config.shapes import ModelShape, MoEShape
from model.moe import begin_step, update_balance
from tests.model.test_moe import SHAPE, backward, batch, model_with

ONE_LAYER = ModelShape(**{**vars(SHAPE), "moe": MoEShape(8, 2, 16, first_dense_layers=2)})


def router_gradient(**keys) -> torch.Tensor:
    model = model_with(**keys)
    backward(model, *batch())
    return model.layers["2"].moe.router.gate.weight.grad


def test_router_gradient_is_linear_in_the_coefficient_and_equals_autograd():
    zero, one, two = (router_gradient(balance="aux_loss", aux_loss_coeff=c) for c in (0.0, 1.0, 2.0))
    torch.testing.assert_close(two - zero, 2 * (one - zero), rtol=1e-4, atol=1e-7)

    model = model_with(balance="none")
    captured = {}
    model.layers["2"].moe.router.register_forward_hook(lambda m, i, out: captured.update(routing=out))
    tokens, labels = batch()
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
    routing = captured["routing"]
    f = routing.requested.double().mean(0) / 2
    reference = 8 * (f * routing.probabilities.double().mean(0)).sum()
    (loss + reference).backward()
    torch.testing.assert_close(one, model.layers["2"].moe.router.gate.weight.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "keys, coefficient",
    [
        (dict(balance="none", z_loss_coeff=0.3), 0.3),
        (dict(balance="aux_loss", aux_loss_coeff=0.0, z_loss_coeff=0.3), 0.3),
        (dict(balance="sequence_aux_loss", aux_loss_coeff=0.7), 0.7),
        (dict(balance="bias_sign", extra_sequence_coeff=0.7), 0.7),
        (dict(balance="bias_sign", aux_loss_coeff=0.7), 0.0),
    ],
)
def test_each_loss_has_its_own_coefficient(keys, coefficient):
    model, plain, captured = model_with(ONE_LAYER, **keys), model_with(ONE_LAYER, balance="none"), {}
    plain.layers["2"].moe.router.register_forward_hook(lambda m, i, out: captured.update(routing=out))
    begin_step(model, 1, total_steps=1, balance_groups=2)
    (0.0 * model(batch()[0]).sum()).backward()
    plain(batch()[0])
    routing = captured["routing"]
    if "z_loss_coeff" in keys:
        reference = routing.logits.exp().sum(-1).log().square().mean()
    else:
        f, p = (t.float().view(4, 16, 8).mean(1) for t in (routing.requested, routing.probabilities))
        reference = 8 * (f / 2 * p).sum(-1).mean()
    expected = torch.autograd.grad(coefficient * reference / 2, plain.layers["2"].moe.router.gate.weight)[0]
    torch.testing.assert_close(model.layers["2"].moe.router.gate.weight.grad, expected, rtol=1e-4, atol=1e-8)
    assert bool(expected.any()) == (coefficient > 0)


def test_accumulation_sums_balance_groups_with_their_share():
    """Two micro-batches in one step: the gradient of the mean of their balance losses."""
    tokens, labels = batch(rows=4)
    model = model_with(balance="aux_loss", aux_loss_coeff=1.0)
    begin_step(model, 1, total_steps=1, balance_groups=2)
    for part in (slice(0, 2), slice(2, 4)):
        logits = model(tokens[part])
        (0.0 * logits.sum()).backward()
    accumulated = model.layers["2"].moe.router.gate.weight.grad.clone()
    single = torch.zeros_like(accumulated)
    for part in (slice(0, 2), slice(2, 4)):
        alone = model_with(balance="aux_loss", aux_loss_coeff=1.0)
        (0.0 * alone(tokens[part]).sum()).backward()
        single += alone.layers["2"].moe.router.gate.weight.grad / 2
    torch.testing.assert_close(accumulated, single)
    assert accumulated.any()


def test_exact_global_f_does_not_know_how_the_batch_is_split():
    tokens, _ = batch(rows=4)

    def gradient(parts: int) -> torch.Tensor:
        model = model_with(balance="global_aux_loss", f_source="exact", aux_loss_coeff=1.0)
        begin_step(model, 1, total_steps=1, balance_groups=parts)
        with torch.no_grad():
            for piece in tokens.chunk(parts):
                model.count_global(piece)
        for piece in tokens.chunk(parts):
            (0.0 * model(piece).sum()).backward()
        return model.layers["1"].moe.router.gate.weight.grad

    whole = gradient(1)
    assert whole.abs().max() > 1e-6
    for parts in (2, 4):
        torch.testing.assert_close(gradient(parts), whole, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("f_source", ["running", "previous_step"])
def test_global_f_is_of_the_micro_batches_so_far_or_of_the_step_before(f_source):
    """Gradients of two steps of two micro-batches, against autograd with f from counts that the test keeps."""
    model = model_with(ONE_LAYER, balance="global_aux_loss", f_source=f_source, aux_loss_coeff=1.0)
    plain = model_with(ONE_LAYER, balance="none")
    captured = {}
    plain.layers["2"].moe.router.register_forward_hook(lambda m, i, out: captured.update(routing=out))
    mine, theirs = (m.layers["2"].moe.router.gate.weight for m in (model, plain))
    before = torch.zeros(8)
    for step in (1, 2):
        model.zero_grad()
        begin_step(model, step, total_steps=2, balance_groups=2)
        now, loss = torch.zeros(8), torch.zeros(())
        for part in (0, 1):
            tokens, _ = batch(seed=10 * step + part)
            (0.0 * model(tokens).sum()).backward()
            plain(tokens)
            routing = captured["routing"]
            now = now + routing.requested.sum(0)
            f = now / now.sum() if f_source == "running" else before / before.sum() if step > 1 else torch.ones(8) / 8
            loss = loss + 8 * (f * routing.probabilities.mean(0)).sum() / 2
        update_balance(model, step)
        before = now
        expected = torch.autograd.grad(loss, theirs)[0]
        torch.testing.assert_close(mine.grad, expected, rtol=1e-4, atol=1e-7)
        assert bool(expected.abs().max() > 1e-6) == (f_source == "running" or step > 1), "a uniform f has no gradient"
