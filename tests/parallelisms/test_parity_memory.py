"""Rows of the parity harness for what keeps less in memory, or keeps it elsewhere, as far as a CPU runs it."""

import pytest

import parallelisms.activation_offload
from tests import parity, ranks
from tests.parallelisms.test_parity_data import FSDP2, tiny
from tests.parallelisms.test_parity_moe import sparse

AC = "activation_checkpoint__"
COMPILED = {"compile__enable": True, "compile__components": ["model"], "compile__backend": "aot_eager"}
BUDGET = COMPILED | {f"{AC}mode": "memory_budget", f"{AC}memory_budget": 0.2}
DENSE = {
    "nested": (1, {f"{AC}mode": "nested"}),
    "nested, fsdp2": (2, FSDP2 | {f"{AC}mode": "nested"}),
    "memory budget": (1, BUDGET),
    "memory budget, fsdp2": (2, FSDP2 | BUDGET),
}
EXPERTS = {
    "around experts": (1, {f"{AC}mode": "experts"}),
    "around experts, fsdp2": (2, FSDP2 | {f"{AC}mode": "experts"}),
    "around experts, ep2": (2, FSDP2 | {f"{AC}mode": "experts", "parallelism__expert_parallel_degree": 2}),
    "nested, fsdp2": (2, FSDP2 | {f"{AC}mode": "nested"}),
}


@pytest.mark.parametrize("row", DENSE)
def test_what_is_recomputed_trains_alike(row):
    world_size, changes = DENSE[row]
    parity.check(tiny(), tiny(**changes), world_size=world_size)


@pytest.mark.parametrize("row", EXPERTS)
def test_experts_train_alike(row):
    world_size, changes = EXPERTS[row]
    model = {"moe__balance": "aux_loss", "moe__aux_loss_coeff": 1.0, "moe__experts": "grouped_mm"}
    parity.check(sparse(**model), sparse(**model, **changes), world_size=world_size)


def set_minimum(size: int) -> int:
    before = parallelisms.activation_offload.MINIMUM_BYTES
    parallelisms.activation_offload.MINIMUM_BYTES = size
    return before


@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_moves_trains_alike_under_fsdp(mode):
    """A CPU copies what a GPU would send; tensors of this size would stay, so the bound is taken away."""
    before = ranks.run(2, set_minimum, 0)
    offload = {f"{AC}mode": mode, f"{AC}offload": True}
    parity.check(tiny(), tiny(**FSDP2 | offload), world_size=2)
    ranks.run(2, set_minimum, before[0])
