"""Rows of the parity harness for tensor and sequence parallelism, alone and with every kind of data parallelism."""

import pytest

from tests import parity
from tests.parallelisms.test_parity_data import tiny

TP2 = {"parallelism__tensor_parallel_degree": 2}
TP4 = {"parallelism__tensor_parallel_degree": 4, "model__n_kv_heads": 4}
DDP2 = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
HSDP = {"parallelism__data_parallel_replicate_degree": 2}
FULL = {"activation_checkpoint__mode": "full"}
BY_OPERATOR = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
COMPILE = {"compile__enable": True, "compile__backend": "aot_eager"}
MASKED = {
    "model__enable_weight_tying": True, "model__qk_norm": True,
    "data__document_mask": True, "data__mask_boundary_labels": True,
}  # fmt: skip
ROWS = {
    "tp2": (2, TP2, {}),
    "fsdp2 x tp2, tied, masks, qk norm": (4, TP2, MASKED),
    "ddp2 x tp2, by operator": (4, TP2 | DDP2 | BY_OPERATOR, MASKED),
}
SLOW = {
    "tp2, logits gathered": (2, TP2 | {"parallelism__disable_loss_parallel": True}, {}),
    "tp2, logits gathered, tied": (2, TP2 | {"parallelism__disable_loss_parallel": True}, MASKED),
    "tp2, full checkpointing": (2, TP2 | FULL, MASKED),
    "tp2, every 2nd block checkpointed": (2, TP2 | {"activation_checkpoint__mode": "selective"}, {}),
    "tp2, compiled": (2, TP2 | COMPILE, MASKED),
    "tp2, compiled, full checkpointing": (2, TP2 | COMPILE | FULL, {}),
    "tp4": (4, TP4, {}),
    "tp4, tied, masks, qk norm": (4, TP4 | FULL, MASKED),
    "fsdp2 x tp2": (4, TP2, {}),
    "fsdp2 x tp2, kept after forward, compiled": (4, TP2 | COMPILE | {"parallelism__zero_stage": 2}, MASKED),
    "ddp2 x tp2": (4, TP2 | DDP2, {}),
    "hsdp 2x2 x tp2": (8, TP2 | HSDP, MASKED | {"training__local_batch_size": 1}),
    "fsdp4 x tp2, full checkpointing": (8, TP2 | FULL, {"training__local_batch_size": 1}),
    "fsdp2 x tp4": (8, TP4, {}),
}


def sparse(**changes):
    """A tiny mixture of experts."""
    small = {"model__name": "moe", "model__flavor": "debug_moe", "moe__hidden_dim": 16, "moe__num_experts": 4}
    return tiny(**small | changes)


def check(rows, row, make=tiny):
    world_size, layout, model = rows[row]
    kv_heads = layout.get("model__n_kv_heads", 2)
    layout = {key: value for key, value in layout.items() if not key.startswith("model__")}
    model = {"model__n_kv_heads": kv_heads, **model}
    return parity.check(make(**model), make(**model | layout), world_size=world_size)


@pytest.mark.parametrize("row", ROWS)
def test_tensor_parallel_ranks_train_as_one_process_does(row):
    check(ROWS, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
def test_every_other_combination(row):
    check(SLOW, row)


# Batch 2 and unequal rows: a router gradient that is summed over tp, or not at all, or wrong indices when the sequence
# is gathered, show (torchtitan #4054, #4154, #2416; Megatron #5047).
EXPERTS = {
    "aux loss, z-loss": {"moe__balance": "aux_loss", "moe__aux_loss_coeff": 1.0, "moe__z_loss_coeff": 0.1},
    "sequence-wise, masked labels": {
        "moe__balance": "bias_sign", "moe__bias_update_rate": 0.05, "moe__extra_sequence_coeff": 1.0,
        "data__document_mask": True, "data__mask_boundary_labels": True,
    },
    "noise, shared expert, dense layer": {
        "moe__balance": "none", "moe__jitter": 0.1, "moe__gumbel_tau": 0.5, "moe__num_shared_experts": 1,
        "moe__first_dense_layers": 1,
    },
    "capacity, exact load": {
        "moe__balance": "global_aux_loss", "moe__f_source": "exact", "moe__aux_loss_coeff": 1.0,
        "moe__capacity": "score", "moe__capacity_factor": 1.0,
    },
    "one query norm for all heads": {"model__flavor": "OLMoE-1B-7B", "model__n_heads": 4, "model__head_dim": 8,
        "moe__top_k": 2},
    "quantile, stacked products": {"moe__balance": "quantile", "moe__experts": "grouped_mm"},
}  # fmt: skip


@pytest.mark.parametrize("model", ["aux loss, z-loss", "one query norm for all heads"])
def test_tensor_parallel_ranks_train_experts_as_one_process_does(model):
    check({model: (2, TP2, EXPERTS[model])}, model, sparse)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, DDP2, FULL, BY_OPERATOR], ids=["alone", "ddp2", "full", "by operator"])
@pytest.mark.parametrize("model", EXPERTS)
def test_experts_in_every_other_combination(model, layout):
    check({model: (4 if layout is DDP2 else 2, TP2 | layout, EXPERTS[model])}, model, sparse)


@pytest.mark.slow
def test_experts_under_fsdp_and_tensor_parallelism():
    check({"": (4, TP2, EXPERTS["aux loss, z-loss"])}, "", sparse)
