"""Exact counts against published ones and against formulas written out by hand."""

from dataclasses import replace

import pytest

from config.arithmetic import flops_per_token, parameter_counts, tensors
from config.flavors import FLAVORS
from config.memory import memory
from config.shapes import MoEShape

LLAMA = FLAVORS["llama3"]


@pytest.mark.parametrize(
    ("flavor", "total"),
    [
        ("debugmodel", 6_163_712),
        ("1B", 1_235_814_400),
        ("1B_untied", 1_498_482_688),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_published_parameter_counts(flavor, total):
    counts = parameter_counts(LLAMA[flavor])
    assert counts.total == counts.active == total
    assert counts.total == counts.embedding + counts.layers + counts.head + LLAMA[flavor].dim


def test_tying_saves_one_matrix():
    assert parameter_counts(LLAMA["1B_untied"]).total - parameter_counts(LLAMA["1B"]).total == 128_256 * 2048
    assert parameter_counts(LLAMA["1B"]).head == 0


def test_the_formula_by_hand():
    s = LLAMA["8B"]
    attention = s.dim * s.head_dim * (2 * s.n_heads + 2 * s.n_kv_heads)
    block = attention + 3 * s.dim * s.hidden_dim + 2 * s.dim
    assert parameter_counts(s).total == 2 * s.vocab_size * s.dim + s.n_layers * block + s.dim
    assert parameter_counts(s).layers == s.n_layers * block
    assert parameter_counts(s).norms == (2 * s.n_layers + 1) * s.dim


def test_flops_of_both_formulas():
    s, seq = LLAMA["8B"], 8192
    flops = flops_per_token(s, seq)
    assert flops.torchtitan == 6 * (8_030_261_248 - 128_256 * 4096) + 6 * 32 * 32 * 2 * 128 * seq
    norms = parameter_counts(s).norms
    assert flops.causal_with_head == 6 * (8_030_261_248 - 128_256 * 4096 - norms) + 6 * 32 * 32 * 128 * (seq + 1)
    # a published speed: 9,290 tokens/s at 538 TFLOP/s
    assert 9290 * flops.torchtitan / 1e12 == pytest.approx(538, abs=1)


def test_a_tied_head_counts_as_work_only_in_the_causal_formula():
    tied, untied = flops_per_token(LLAMA["1B"], 4096), flops_per_token(LLAMA["1B_untied"], 4096)
    assert tied.causal_with_head == untied.causal_with_head
    assert untied.torchtitan - tied.torchtitan == 6 * 128_256 * 2048
    assert 53_400 * untied.torchtitan / 1e12 == pytest.approx(481, abs=2)


def test_a_token_works_in_shared_experts_and_in_those_it_is_sent_to():
    moe = MoEShape(num_experts=8, top_k=2, hidden_dim=48, num_shared_experts=1)
    s = replace(LLAMA["debugmodel"], n_layers=3, moe=moe)
    attention = s.dim * s.head_dim * (2 * s.n_heads + 2 * s.n_kv_heads)
    block = attention + 8 * s.dim + 3 * s.dim * (2 * 48 + moe.shared_dim)
    attended = s.n_layers * s.n_heads * s.head_dim
    linear, head = s.n_layers * block, s.vocab_size * s.dim
    flops = flops_per_token(s, 64)
    assert moe.shared_dim > 0
    assert flops.causal_with_head == 6 * (linear + head) + 6 * attended * 65
    assert flops.torchtitan == 6 * (linear + head + (2 * s.n_layers + 1) * s.dim) + 12 * attended * 64


def test_memory_of_ddp_and_fsdp():
    total = parameter_counts(LLAMA["8B"]).total
    whole = memory(LLAMA["8B"], "AdamW")
    assert (whole.parameters, whole.gradients, whole.optimizer_states) == (4 * total, 4 * total, 8 * total)
    assert memory(LLAMA["8B"], "AdamW", 8).total * 8 == whole.total == 16 * total
    assert memory(LLAMA["8B"], "SGD").optimizer_states == 0


def test_a_dimension_that_does_not_divide_fills_the_first_rank():
    uneven = sum(-(-t.shape[0] // 3) * (t.numel // t.shape[0]) for t in tensors(LLAMA["debug"]))
    held = memory(LLAMA["debug"], "AdamW", 3).parameters
    assert held == 4 * uneven > 4 * parameter_counts(LLAMA["debug"]).total / 3
