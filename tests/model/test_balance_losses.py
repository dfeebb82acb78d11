import math

import pytest
import torch

from model.balance_losses import aux_loss, aux_loss_of, inject_loss, router_entropy, sequence_aux_loss, z_loss

T, E, K = 24, 6, 2


def example(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, generator=generator, dtype=torch.float64)
    requested = torch.zeros(T, E, dtype=torch.bool).scatter(1, logits.topk(K).indices, True)
    return logits, logits.softmax(-1), requested


def slow_aux(probabilities, requested, valid):
    """E sum_i f_i P_i, token by token."""
    f, p, n = [0.0] * E, [0.0] * E, 0
    for t in range(len(probabilities)):
        if valid[t]:
            n += 1
            for i in range(E):
                f[i] += float(requested[t, i])
                p[i] += float(probabilities[t, i])
    return E * sum(f[i] / (n * K) * p[i] / n for i in range(E)) if n else 0.0


def test_aux_loss_equals_a_slow_reference_and_is_one_when_uniform():
    _, probabilities, requested = example()
    valid = torch.rand(T, generator=torch.Generator().manual_seed(1)) < 0.7
    assert float(aux_loss(probabilities, requested, valid, K)) == pytest.approx(
        slow_aux(probabilities, requested, valid)
    )
    uniform = torch.full((E, E), 1 / E, dtype=torch.float64)
    rotating = torch.eye(E, dtype=torch.bool) | torch.eye(E, dtype=torch.bool).roll(1, 0)
    assert float(aux_loss(uniform, rotating, torch.ones(E, dtype=torch.bool), K)) == pytest.approx(1.0)
    collapsed = torch.zeros(T, E, dtype=torch.bool)
    collapsed[:, :K] = True
    certain = collapsed.double() / K
    assert float(aux_loss(certain, collapsed, torch.ones(T, dtype=torch.bool), K)) == pytest.approx(E / K)


def test_sequence_loss_is_the_mean_over_sequences():
    _, probabilities, requested = example()
    valid = torch.ones(4, 6, dtype=torch.bool)
    valid[1, 4:] = False
    p, r = probabilities.view(4, 6, E), requested.view(4, 6, E)
    expected = sum(slow_aux(p[b], r[b], valid[b]) for b in range(4)) / 4
    assert float(sequence_aux_loss(p, r, valid, K)) == pytest.approx(expected)
    valid[2] = False  # a sequence of padding
    expected = sum(slow_aux(p[b], r[b], valid[b]) for b in (0, 1, 3)) / 3
    assert float(sequence_aux_loss(p, r, valid, K)) == pytest.approx(expected)
    assert float(sequence_aux_loss(p, r, valid & False, K)) == 0.0


def test_z_loss_and_entropy():
    logits, probabilities, _ = example()
    valid = torch.arange(T) < 10
    expected = sum(math.log(sum(math.exp(float(v)) for v in logits[t])) ** 2 for t in range(10)) / 10
    assert float(z_loss(logits, valid)) == pytest.approx(expected)
    entropy = -sum(float(p) * math.log(float(p)) for t in range(10) for p in probabilities[t]) / 10
    assert float(router_entropy(probabilities, valid)) == pytest.approx(entropy)
    assert float(router_entropy(torch.full((2, E), 1 / E), torch.ones(2, dtype=torch.bool))) == pytest.approx(
        math.log(E)
    )


@pytest.mark.parametrize("loss", ["aux", "sequence", "z"])
def test_a_padded_batch_has_the_loss_and_gradient_of_the_unpadded_one(loss):
    logits, _, _ = example()

    def gradient(count: int, pad: int):
        leaf = logits[:count].clone().requires_grad_()
        full = torch.cat([leaf, torch.full((pad, E), 7.0, dtype=torch.float64)])
        requested = torch.zeros(count + pad, E, dtype=torch.bool).scatter(1, full.topk(K).indices, True)
        valid = torch.arange(count + pad) < count
        if loss == "aux":
            value = aux_loss(full.softmax(-1), requested, valid, K)
        elif loss == "sequence":
            value = sequence_aux_loss(full.softmax(-1)[None], requested[None], valid[None], K)
        else:
            value = z_loss(full, valid)
        return value, torch.autograd.grad(value, leaf)[0]

    for mine, theirs in zip(gradient(16, 9), gradient(16, 0), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_nothing_valid_is_zero_and_finite():
    logits, probabilities, requested = example()
    nobody = torch.zeros(T, dtype=torch.bool)
    leaf = logits.requires_grad_()
    total = aux_loss(leaf.softmax(-1), requested, nobody, K) + z_loss(leaf, nobody)
    total.backward()
    assert float(total.detach()) == 0.0 and not leaf.grad.any()


def test_f_carries_no_gradient_and_the_gradient_is_analytic():
    logits, _, requested = example()
    leaf = logits.clone().requires_grad_()
    valid = torch.ones(T, dtype=torch.bool)
    aux_loss(leaf.softmax(-1), requested, valid, K).backward()
    p, f = logits.softmax(-1), requested.double().mean(0) / K
    expected = E / T * p * (f - (p * f).sum(-1, keepdim=True))
    torch.testing.assert_close(leaf.grad, expected)


def test_splitting_the_batch_changes_the_local_loss_and_not_the_global_one():
    logits, probabilities, requested = example()
    valid, counts = torch.ones(T, dtype=torch.bool), requested.sum(0)
    whole = aux_loss(probabilities, requested, valid, K)
    for parts in (2, 4, 8):
        pieces = list(zip(probabilities.chunk(parts), requested.chunk(parts), valid.chunk(parts), strict=True))
        local = sum(aux_loss(p, r, v, K) for p, r, v in pieces) / parts
        pooled = sum(aux_loss_of(p, counts, v, K) for p, _, v in pieces) / parts
        assert abs(float(local - whole)) > 1e-3
        torch.testing.assert_close(pooled, whole)
    no_counts = aux_loss_of(probabilities, torch.zeros(E, dtype=torch.int64), valid, K)
    assert float(no_counts) == pytest.approx(1.0)


def test_ranks_that_share_a_group_sum_to_the_loss_of_the_whole():
    _, probabilities, requested = example()
    valid = torch.arange(T) < 20
    whole = aux_loss(probabilities, requested, valid, K) + 0.0
    halves = [slice(0, 12), slice(12, T)]
    totals = {"counts": (requested & valid[:, None]).sum(0), "tokens": valid.sum()}
    parts = [
        aux_loss(probabilities[h], requested[h], valid[h], K, lambda x: totals["counts" if x.dim() else "tokens"])
        for h in halves
    ]
    torch.testing.assert_close(sum(parts), whole)


def test_inject_loss_adds_a_gradient_whatever_comes_back():
    x = torch.randn(3, requires_grad=True)
    source = torch.tensor(2.0, requires_grad=True)
    y = inject_loss(x, 5.0 * source)
    assert torch.equal(y, x)
    (1000.0 * y).sum().backward()
    assert source.grad == 5.0 and torch.equal(x.grad, torch.full((3,), 1000.0))
