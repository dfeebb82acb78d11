"""Rows of the parity harness for experts in a pipeline: their loads must be those of one process exactly."""

import pytest

from tests import parity
from tests.parallelisms.test_parity_moe import MODELS, sparse
from tests.parallelisms.test_parity_tensor import TP2
from tests.parallelisms.test_pipeline_parity import COMPILED, DDP2, EVERY_2ND, FULL, MASKS, pp

# A balance group is a local batch, so a pipeline's micro-batch is one too. Two sequences a micro-batch and 8 layers'
# worth of stages would be slow: four layers, of which the first is dense, so that one stage holds none with experts.
BASE = {"model__n_layers": 4, "training__global_batch_size": 16}
WHOLE = {"parallelism__pipeline_parallel_microbatch_size": 2}
FREE = {"moe__balance": "bias_sign", "moe__bias_update_rate": 0.05}  # a rule without groups: micro-batches of any size
PREVIOUS = {"moe__balance": "global_aux_loss", "moe__f_source": "previous_step", "moe__aux_loss_coeff": 1.0}
AUX = MODELS["aux loss, z-loss"]
ROWS = {
    "pp2 1F1B, aux loss, z-loss": (2, AUX | MASKS, pp("1F1B") | WHOLE),
    "pp2 ZBVZeroBubble, bias, masked labels": (2, MODELS["bias, masked labels"], pp("ZBVZeroBubble") | WHOLE),
    "pp2 Interleaved1F1B, noise, shared expert, dense layer": (
        2, MODELS["noise, shared expert"], pp("Interleaved1F1B") | WHOLE
    ),
    "pp2 x fsdp2 1F1B, aux loss, z-loss": (4, AUX | MASKS, pp("1F1B") | WHOLE),
}  # fmt: skip
SLOW = {
    "pp2 naive, aux loss": (2, AUX, pp("naive")),
    "pp2 1F1B, global load so far": (2, MODELS["global load so far"], pp("1F1B") | WHOLE),
    "pp2 ZBVZeroBubble, load of the last step": (2, PREVIOUS, pp("ZBVZeroBubble") | WHOLE),
    "pp2 1F1B, quantile of logits": (2, MODELS["quantile of logits"], pp("1F1B") | WHOLE),
    "pp2 1F1B, quantile of the batch, one sequence a micro-batch": (2, MODELS["quantile of the batch"], pp("1F1B")),
    "pp2 1F1B, bias, one sequence a micro-batch": (2, FREE | MASKS, pp("1F1B")),
    "pp2 1F1B, capacity": (2, AUX | {"moe__capacity": "score", "moe__capacity_factor": 1.0}, pp("1F1B") | WHOLE),
    "pp2 1F1B, full checkpointing": (2, AUX, pp("1F1B") | WHOLE | FULL),
    "pp2 Interleaved1F1B, every 2nd block checkpointed": (2, AUX, pp("Interleaved1F1B") | WHOLE | EVERY_2ND),
    "pp2 1F1B, compiled": (2, AUX, pp("1F1B") | WHOLE | COMPILED),
    **{f"pp2 {name}": (2, AUX, pp(name) | WHOLE) for name in ("GPipe", "InterleavedZeroBubble", "DualPipeV")},
    "pp2 x fsdp2 ZBVZeroBubble": (4, AUX | MASKS, pp("ZBVZeroBubble") | WHOLE),
    "pp2 x fsdp2 Interleaved1F1B": (4, AUX, pp("Interleaved1F1B") | WHOLE),
    "pp2 x ddp2 1F1B, bias": (4, MODELS["bias, masked labels"], pp("1F1B") | WHOLE | DDP2),
    "pp2 x tp2 1F1B": (4, AUX, pp("1F1B") | WHOLE | TP2),
    "pp4 1F1B": (4, AUX, pp("1F1B", 4) | WHOLE),
}


def check(row: tuple[int, dict, dict]) -> None:
    world_size, both, added = row
    both = BASE | both
    parity.check(sparse(**both), sparse(**both | added), world_size=world_size, steps=3)


@pytest.mark.parametrize("row", ROWS)
def test_experts_in_a_pipeline_train_as_in_one_process(row):
    check(ROWS[row])


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
def test_every_combination_of_experts_in_a_pipeline(row):
    check(SLOW[row])
