"""Rows of the parity harness for the ladder of ZeRO stages, FSDP1, and FSDP2's prefetch."""

import pytest

from tests import parity
from tests.parallelisms.test_parity_data import MODELS, tiny

STAGE = {stage: {"parallelism__zero_stage": stage} for stage in range(4)}
FSDP1 = {"parallelism__fsdp_version": 1}
FULL = {"activation_checkpoint__mode": "full"}
ROWS = {
    "zero 1": (2, STAGE[1]),
    "zero 2, two blocks ahead": (2, STAGE[2] | {"parallelism__fsdp_prefetch_blocks": 2}),
    "fsdp1": (2, FSDP1),
}
SLOW = {
    "zero 0": (2, STAGE[0]),
    "zero 1, full checkpointing": (4, STAGE[1] | FULL),
    "zero 3, one block ahead": (4, STAGE[3] | {"parallelism__fsdp_prefetch_blocks": 1}),
    "fsdp1, kept after forward": (2, FSDP1 | {"parallelism__fsdp_reshard_after_forward": "never"}),
    "fsdp1, full checkpointing": (4, FSDP1 | FULL),
    "fsdp1, compiled": (2, FSDP1 | {"compile__enable": True, "compile__backend": "aot_eager"}),
}


@pytest.mark.parametrize("row", ROWS)
def test_a_rung_trains_as_one_process_does(row):
    world_size, changes = ROWS[row]
    model = MODELS["tied, document masks"]
    parity.check(tiny(**model), tiny(**model | changes), world_size=world_size)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
@pytest.mark.parametrize("model", MODELS)
def test_every_other_rung(row, model):
    world_size, changes = SLOW[row]
    parity.check(tiny(**MODELS[model]), tiny(**MODELS[model] | changes), world_size=world_size)
