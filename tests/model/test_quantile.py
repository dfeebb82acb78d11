import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from config.schema import Moe
from config.shapes import MoEShape
from model.balance import Balance
from model.quantile import (
    BINS,
    PRESETS,
    _from_sortable,
    _sortable,
    exact_quantile,
    histogram,
    histogram_quantile,
    histogram_range,
    margins,
    pooled_quantile,
    quantile_rule,
)
from model.router import Router

T, E, K = 96, 8, 2


def example(tokens: int = T, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, E, generator=generator) + torch.linspace(-1, 1, E)
    bias = 0.1 * torch.randn(E, generator=generator)
    return logits, bias


def cutoffs(scores, bias):
    return (scores + bias).topk(K + 1, dim=-1).values[:, K]


def slow_margins(scores, bias, statistic):
    """r_ij = alpha_i - s_ij by sorting each token's choice scores in float64."""
    found = []
    for row in scores.double():
        alpha = sorted((row + bias.double()).tolist(), reverse=True)[K]
        found.append([(alpha if statistic == "margin" else 0.0) - float(s) for s in row])
    return found


@pytest.mark.parametrize("statistic", ["margin", "column"])
def test_exact_quantile_equals_a_slow_reference(statistic):
    logits, bias = example()
    found = exact_quantile(
        margins(logits, cutoffs(logits, bias), torch.ones(T, dtype=torch.bool), statistic), torch.tensor(T), K
    )
    rows = slow_margins(logits, bias, statistic)
    for expert in range(E):
        column = sorted(row[expert] for row in rows)
        assert float(found[expert]) == pytest.approx(column[T * K // E], abs=1e-6)


def test_megatron_beta_is_minus_our_bias():
    """qb_dual_update: the (T k / E + 1)-th largest of s - alpha, with alpha the (k + 1)-th largest of s - beta."""
    logits, bias = example()
    beta = -bias
    alpha = (logits - beta).topk(K + 1, dim=1).values[:, -1:]
    theirs = (logits - alpha).topk(T * K // E + 1, dim=0).values[-1]
    mine = exact_quantile(
        margins(logits, cutoffs(logits, bias), torch.ones(T, dtype=torch.bool), "margin"), torch.tensor(T), K
    )
    torch.testing.assert_close(mine, -theirs)


def test_padding_is_not_a_token():
    logits, bias = example()
    padded = torch.cat([logits, torch.full((40, E), 9.0)])
    valid = torch.arange(T + 40) < T
    rule = PRESETS["kimi_k3"]
    whole = margins(logits, cutoffs(logits, bias), torch.ones(T, dtype=torch.bool), "margin")
    more = margins(padded, cutoffs(padded, bias), valid, "margin")
    assert torch.equal(exact_quantile(more, valid.sum(), K), exact_quantile(whole, torch.tensor(T), K))
    assert torch.equal(
        histogram(more, valid, bias, rule), histogram(whole, torch.ones(T, dtype=torch.bool), bias, rule)
    )


def test_histogram_quantile_equals_a_slow_reference_and_is_close_to_the_exact_one():
    logits, bias = example(4096)
    rule, valid, scores = PRESETS["kimi_k3"], torch.ones(4096, dtype=torch.bool), logits.sigmoid()
    found = margins(scores, cutoffs(scores, bias), valid, "margin")
    counts = histogram(found, valid, bias, rule)
    assert counts.shape == (E, BINS) and counts.sum(1).tolist() == [4096] * E
    mine = histogram_quantile(counts, bias, K, rule)
    low = float(bias.min()) - 1.0
    width = (float(bias.max()) + 1.0 - low) / BINS
    for expert in range(E):
        bins = [min(BINS - 1, max(0, math.floor((float(r) - low) / width))) for r in found[:, expert]]
        target, before, place = 4096 * K / E, 0, 0
        while before + bins.count(place) < math.ceil(target):
            before += bins.count(place)
            place += 1
        assert float(mine[expert]) == pytest.approx(
            low + (place + (target - before) / bins.count(place)) * width, abs=2e-3
        )
    exact = exact_quantile(found, torch.tensor(4096), K)
    assert float((mine - exact).abs().max()) < 2 * float(histogram_range(bias, rule)[1])


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_quantile_over_ranks_is_the_quantile_of_the_pooled_tokens(ranks):
    """Ranks as threads that add up their counts at a barrier."""
    logits, bias = example()
    column = margins(logits, cutoffs(logits, bias), torch.arange(T) != 5, "margin")
    whole = exact_quantile(column, torch.tensor(T - 1), K)
    shards, barrier, parts = column.chunk(ranks), threading.Barrier(ranks), [torch.zeros(E)] * ranks

    def rank(index: int) -> torch.Tensor:
        def reduce(mine: torch.Tensor) -> torch.Tensor:
            parts[index] = mine
            barrier.wait()
            total = torch.stack(list(parts)).sum(0)
            barrier.wait()
            return total

        return pooled_quantile(shards[index], torch.tensor(T - 1), K, reduce)

    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(rank, range(ranks)):
            assert torch.equal(found, whole)


def test_the_order_of_floats_survives_the_bit_trick():
    values = torch.tensor([-torch.inf, -3.5, -1e-30, -0.0, 0.0, 1e-30, 2.0, torch.inf])
    order = _sortable(values)
    assert bool((order.diff() > 0).all()) and torch.equal(_from_sortable(order), values)


def test_presets_differ_where_micro_batches_differ():
    """The mean of two micro-batches' quantiles is not the quantile of both together."""
    calm = torch.zeros(64, E).index_fill_(1, torch.tensor([0]), 0.1) + 0.001 * torch.randn(
        64, E, generator=torch.Generator().manual_seed(1)
    )
    wild = 4.0 * torch.randn(64, E, generator=torch.Generator().manual_seed(2))
    bias, valid = torch.zeros(E), torch.ones(64, dtype=torch.bool)
    columns = [margins(s, cutoffs(s, bias), valid, "margin") for s in (calm, wild)]
    mean = sum(exact_quantile(c, torch.tensor(64), K) for c in columns) / 2
    pooled = exact_quantile(torch.cat(columns), torch.tensor(128), K)
    assert float((mean - pooled).abs().max()) > 0.3
    taken = [
        int((torch.cat([calm, wild]) + b).topk(K).indices.flatten().bincount(minlength=E).max()) for b in (mean, pooled)
    ]
    assert taken[1] < taken[0], "only the pooled quantile balances the pooled batch"


def test_presets_are_the_published_ones():
    assert quantile_rule(Moe(quantile_preset="megatron")) == PRESETS["megatron"]
    rule = quantile_rule(Moe(quantile_preset="custom", quantile_statistic="column", quantile_estimator="exact"))
    assert (rule.statistic, rule.estimator, rule.score) == ("column", "exact", "sigmoid")


def test_a_quantile_step_balances_the_batch_it_was_taken_from():
    logits, bias = example(8192)
    scores, valid = logits.sigmoid(), torch.ones(8192, dtype=torch.bool)
    load = lambda b: (scores + b).topk(K).indices.flatten().bincount(minlength=E).max() / (8192 * K / E) - 1  # noqa: E731
    before = float(load(bias))
    for _ in range(6):
        bias = exact_quantile(margins(scores, cutoffs(scores, bias), valid, "margin"), torch.tensor(8192), K)
        bias = bias - bias.mean()
    assert before > 0.5 and float(load(bias)) < 0.05


@pytest.mark.parametrize("preset", ["megatron", "kimi_k3"])
def test_a_preset_pools_a_step_as_its_source_does(preset):
    """From the router to the bias, over two micro-batches that differ: one pools them, the other averages."""
    shape, moe = MoEShape(E, K, 4, score_func="sigmoid"), Moe(balance="quantile", quantile_preset=preset)
    router, balance = Router(E, shape, moe), Balance(shape, moe, noise_seed=0, layer=0)
    torch.nn.init.eye_(router.gate.weight)
    offsets = torch.linspace(-1, 1, E)
    pieces = [0.05 * example(256, seed=1)[0] + offsets, 4.0 * example(256, seed=2)[0] - 3 * offsets]
    valid = torch.ones(1, 256, dtype=torch.bool)
    for piece in pieces:
        key = balance.noise_key
        routing = router(piece, torch.arange(256), valid[0], key, torch.zeros(()), balance.bias, balance.choose_by)
        balance.count(balance.observe(routing, valid, None)[1])
    balance.update(1, balance.counts.clone(), lambda x: x)

    def of(logits: torch.Tensor) -> torch.Tensor:
        rows = slow_margins(logits if preset == "megatron" else logits.sigmoid(), torch.zeros(E), "margin")
        return torch.tensor(rows).sort(0).values[len(rows) * K // E]

    mean, pooled = sum(of(piece) for piece in pieces) / 2, of(torch.cat(pieces))
    mean, pooled = mean - mean.mean(), pooled - pooled.mean()
    expected, other = (mean, pooled) if preset == "megatron" else (pooled, mean)
    bin_width = 0.0 if preset == "megatron" else 2 / BINS
    assert float((balance.bias - expected).abs().max()) < 2 * bin_width + 1e-5
    assert float((balance.bias - other).abs().max()) > 0.05
