"""Rows of the parity harness for experts whose sequences are shared: a balance group is reduced over context ranks."""

import pytest

from tests import parity
from tests.parallelisms.test_parity_context import BY_OPERATOR, COMPILE, CP2, CP4, FULL, METHOD, PP2, TP2
from tests.parallelisms.test_parity_tensor import EXPERTS, sparse

EP2, ONCE = {"parallelism__expert_parallel_degree": 2}, {"moe__dispatcher": "all_to_all_dedup"}
AUX, SEQUENCE = EXPERTS["aux loss, z-loss"], EXPERTS["sequence-wise, masked labels"]
NOISE = EXPERTS["noise, shared expert, dense layer"]
GLOBAL = {"moe__balance": "global_aux_loss", "moe__aux_loss_coeff": 1.0}
QUANTILE = {"moe__balance": "quantile", "moe__quantile_preset": "custom"}
SMALL, KV4 = {"training__local_batch_size": 1}, {"model__n_kv_heads": 4}
ROWS = {
    "ring 2, aux loss, z-loss": (2, CP2, AUX),
    "fsdp2 x ring 2 x ep2, sequence-wise, masked labels": (4, CP2 | EP2, SEQUENCE),
    "ring 2, running global load": (2, CP2, GLOBAL | {"moe__f_source": "running", "training__local_batch_size": 8}),
}
SLOW = {
    "ring 2, sequence-wise, masked labels": (2, CP2, SEQUENCE),
    "ring 4, aux loss, z-loss": (4, CP4, AUX),
    "ring 2, noise, shared expert": (2, CP2, NOISE),
    "ring 2, exact global load": (2, CP2, GLOBAL | {"moe__f_source": "exact"}),
    # The first step has no load: f is uniform, and the rest of the loss's gradient is rounding: a small coefficient.
    "ring 2, global load of the last step": (
        2,
        CP2,
        GLOBAL | {"moe__f_source": "previous_step", "moe__aux_loss_coeff": 0.01},
    ),
    "ring 2, quantile over the global batch": (2, CP2, QUANTILE | {"moe__quantile_pool": "global"}),
    "ring 2, bias": (2, CP2, {"moe__balance": "bias_sign", "moe__bias_update_rate": 0.05}),
    "allgather 2, full checkpointing": (2, CP2 | METHOD["allgather"] | FULL, AUX),
    "ulysses 2, by operator": (2, CP2 | METHOD["ulysses"] | BY_OPERATOR, AUX),
    "ring 2, by operator": (2, CP2 | BY_OPERATOR, SEQUENCE),
    "ring 2, compiled": (2, CP2 | COMPILE, AUX | {"moe__experts": "grouped_mm"}),
    "ring 2 x ep2": (2, CP2 | EP2, AUX),
    "ulysses 2 x ep2, once a rank, full checkpointing": (2, CP2 | METHOD["ulysses"] | EP2 | ONCE | FULL, NOISE),
    "fsdp2 x ring 2": (4, CP2, SEQUENCE),
    "ring 2 x tp2": (4, CP2 | TP2, AUX | KV4),
    "ring 2 x tp2 x ep2": (4, CP2 | TP2 | EP2, AUX | KV4),
    "ring 2 x pp2, one micro-batch": (4, CP2 | PP2 | {"parallelism__pipeline_parallel_microbatch_size": 2}, AUX),
    "fsdp2 x ring 2 x tp2 x ep4": (8, CP2 | TP2 | {"parallelism__expert_parallel_degree": 4}, AUX | SMALL | KV4),
}


def check(rows, row):
    world_size, layout, model = rows[row]
    parity.check(sparse(**model), sparse(**model | layout), world_size=world_size)


@pytest.mark.parametrize("row", ROWS)
def test_experts_of_shared_sequences_train_as_one_process_does(row):
    check(ROWS, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
def test_every_other_combination(row):
    check(SLOW, row)
