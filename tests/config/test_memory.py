"""Bytes a rank holds: divisions that leave a rest, and the ladder of ZeRO stages."""

import pytest

from config.flavors import FLAVORS
from config.memory import MOMENTS, memory, zero_table

SMALL = FLAVORS["llama3"]["debug"]


def test_tensor_parallelism_cuts_matrices_and_keeps_norms():
    whole, half = memory(SMALL, "AdamW").parameters, memory(SMALL, "AdamW", tensor_degree=2).parameters
    norms = 4 * SMALL.dim * (2 * SMALL.n_layers + 1)
    assert 2 * half == whole + norms


def test_stage_1_hands_out_whole_parameters():
    held = memory(SMALL, "AdamW", state_degree=2)
    assert held.parameters == memory(SMALL, "AdamW").parameters
    assert 0.5 <= held.optimizer_states / (2 * held.parameters) < 0.6
    assert memory(SMALL, "AdamW", state_degree=64).optimizer_states == 2 * 4 * SMALL.vocab_size * SMALL.dim


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_stage_holds_less_in_the_optimizer_step(ranks):
    table = zero_table(SMALL, "AdamW", ranks, compute_bytes=2)
    in_step = [table[stage][MOMENTS[2]] for stage in range(4)]
    assert in_step[0] > in_step[1] > in_step[2] == in_step[3]
    assert table[2][MOMENTS[0]] > table[3][MOMENTS[0]]
    assert table[2][MOMENTS[1]] == table[3][MOMENTS[1]], "FSDP2 shards after backward, whatever it kept before"


def test_bfloat16_moments_halve_the_states_and_nothing_else():
    whole, low = memory(SMALL, "AdamW", state_degree=2), memory(SMALL, "AdamW", state_degree=2, state_bytes=2)
    assert 2 * low.optimizer_states == whole.optimizer_states
    assert (low.parameters, low.gradients) == (whole.parameters, whole.gradients)
