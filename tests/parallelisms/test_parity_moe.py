"""Rows of the parity harness for a mixture of experts under data parallelism.

A balance group is one micro-batch, so local_batch_size stays the same within a row: losses of balance are then the
same on every mesh. Gradients are compared, so a count that is wrong by a factor, or noise that depends on the rank,
shows.
"""

import pytest

from config.schema import Config
from tests import parity
from tests.parallelisms.test_parity_data import DDP2, DIRECT, FSDP2, tiny

# Coefficients are far above use: what they scale must not drown in the cross entropy.
MODELS = {
    "aux loss, z-loss": {"moe__balance": "aux_loss", "moe__aux_loss_coeff": 1.0, "moe__z_loss_coeff": 0.1},
    "global load so far": {"moe__balance": "global_aux_loss", "moe__aux_loss_coeff": 1.0},
    "global load, exact": {"moe__balance": "global_aux_loss", "moe__aux_loss_coeff": 1.0, "moe__f_source": "exact"},
    "bias, masked labels": {
        "moe__balance": "bias_sign", "moe__bias_update_rate": 0.05, "moe__extra_sequence_coeff": 1.0,
        "data__document_mask": True, "data__mask_boundary_labels": True,
    },
    "quantile of logits": {"moe__balance": "quantile", "moe__quantile_preset": "megatron"},
    "quantile of the batch": {"moe__balance": "quantile"},
    "noise, shared expert": {
        "moe__balance": "none", "moe__jitter": 0.1, "moe__gumbel_tau": 0.5, "moe__num_shared_experts": 1,
        "moe__first_dense_layers": 1, "debug__noise_seed": 7,
    },
}  # fmt: skip
ROWS = {
    "ddp2": (2, DDP2),
    "fsdp2": (2, FSDP2),
    "one process, full checkpointing": (1, {"activation_checkpoint__mode": "full"}),
}


def sparse(**changes) -> Config:
    return tiny(model__name="moe", model__flavor="debug_moe", moe__hidden_dim=16, moe__num_experts=4, **changes)


CASES = [
    (model, row)
    for model in MODELS
    for row in ROWS
    # The micro-batches *so far* depend on how many ranks run one at the same time.
    if model != "global load so far" or ROWS[row][0] == 1
]


@pytest.mark.parametrize("model, row", CASES)
def test_a_mesh_trains_experts_as_one_process_does(model, row):
    world_size, changes = ROWS[row]
    parity.check(sparse(**MODELS[model]), sparse(**MODELS[model], **changes), world_size=world_size, steps=3)


def test_direct_collectives_and_gradients_reduced_once():
    """Routers gather and reduce beside blocks; noise and counts are those of the same micro-batches."""
    model = MODELS["aux loss, z-loss"]
    for changes in (DIRECT, {"parallelism__fsdp_reduce_gradients": "last"}):
        parity.check(sparse(**model), sparse(**model, **FSDP2 | changes), world_size=2, steps=3)


def test_fsdp_with_checkpointing_by_operator():
    changes = FSDP2 | {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
    model = MODELS["aux loss, z-loss"]
    parity.check(sparse(**model), sparse(**model, **changes), world_size=2)


def test_accumulation_on_one_rank_equals_as_many_ranks():
    """Four micro-batches in a row are four ranks with one each; all experts receive a gradient on all of them."""
    model = MODELS["aux loss, z-loss"]
    parity.check(sparse(**model), sparse(**model), world_size=4, steps=2)
