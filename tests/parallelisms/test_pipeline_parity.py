"""Rows of the parity harness for pipelines: each schedule, and what it is combined with."""

import pytest

from config.pipeline import SCHEDULES
from tests import parity
from tests.parallelisms.test_parity_data import tiny

LAYERS = {"model__n_layers": 4}
MASKS = {"data__document_mask": True, "data__mask_boundary_labels": True, "model__qk_norm": True}
TIED = {"model__enable_weight_tying": True}
DDP2 = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
FULL = {"activation_checkpoint__mode": "full"}
BY_OPERATOR = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
EVERY_2ND = {"activation_checkpoint__mode": "selective"}
ONE_LAYER = {"parallelism__pipeline_parallel_layers_per_stage": 1}
COMPILED = {"compile__enable": True, "compile__backend": "aot_eager"}
TP2 = {"parallelism__tensor_parallel_degree": 2}
UNEVEN = [["tok_embeddings", "layers.0", "layers.1", "layers.2"], ["layers.3", "norm", "output"]]
HEAD_ALONE = [["tok_embeddings"], ["layers.0", "layers.1"], ["layers.2", "layers.3", "norm"], ["output"]]


def pp(schedule: str, degree: int = 2, **changes) -> dict:
    return {
        "parallelism__pipeline_parallel_degree": degree,
        "parallelism__pipeline_parallel_schedule": schedule,
    } | changes


def explicit(schedule: str, stages: list[list[str]]) -> dict:
    return pp(schedule, parallelism__module_fqns_per_model_part=stages)


# name: (ranks, what both sides have, what the pipeline adds)
ROWS = {
    "pp2 naive": (2, MASKS, pp("naive")),
    "pp2 GPipe": (2, {}, pp("GPipe")),
    "pp2 1F1B, masks": (2, MASKS, pp("1F1B")),
    "pp2 Interleaved1F1B, tied, masks": (2, TIED | MASKS, pp("Interleaved1F1B")),
    "pp2 InterleavedZeroBubble, masks": (2, MASKS, pp("InterleavedZeroBubble")),
    "pp2 ZBVZeroBubble, tied, masks": (2, TIED | MASKS, pp("ZBVZeroBubble")),
    "pp2 DualPipeV": (2, {}, pp("DualPipeV")),
    "pp2 1F1B, uneven stages": (2, MASKS, explicit("1F1B", UNEVEN)),
    "pp2 1F1B, two sequences a micro-batch": (2, MASKS, pp("1F1B", parallelism__pipeline_parallel_microbatch_size=2)),
    "pp2 1F1B, one local batch": (2, MASKS, pp("1F1B", training__local_batch_size=8)),
    "pp2 1F1B, full checkpointing": (2, {}, pp("1F1B") | FULL),
    "pp4 1F1B": (4, MASKS, pp("1F1B", 4)),
    "pp2 x fsdp2 1F1B": (4, MASKS, pp("1F1B")),
    "pp2 x ddp2 ZBVZeroBubble": (4, MASKS, pp("ZBVZeroBubble") | DDP2),
}
SLOW = {
    "pp2 GPipe, tied": (2, TIED, pp("GPipe")),
    "pp2 ZBVZeroBubble, head alone": (2, MASKS, explicit("ZBVZeroBubble", HEAD_ALONE)),
    "pp2 Interleaved1F1B, three stages a rank": (2, {}, pp("Interleaved1F1B", **ONE_LAYER)),
    "pp2 1F1B, checkpointing by operator": (2, {}, pp("1F1B") | BY_OPERATOR),
    "pp2 Interleaved1F1B, every 2nd block checkpointed": (2, {}, pp("Interleaved1F1B") | EVERY_2ND),
    "pp4 GPipe": (4, {}, pp("GPipe", 4)),
    "pp4 naive": (4, {}, pp("naive", 4)),
    "pp4 ZBVZeroBubble": (4, {"model__n_layers": 8}, pp("ZBVZeroBubble", 4)),
    "pp4 DualPipeV, tied": (4, {"model__n_layers": 8} | TIED, pp("DualPipeV", 4)),
    "pp4 InterleavedZeroBubble": (4, {"model__n_layers": 8}, pp("InterleavedZeroBubble", 4)),
    **{
        f"pp2 x {name} {schedule}": (4, MASKS | extra, pp(schedule) | degrees)
        for name, degrees, extra in (("fsdp2", {}, TIED), ("ddp2", DDP2, TIED), ("tp2", TP2, {}))
        for schedule in SCHEDULES
    },
    "pp2 1F1B, compiled": (2, {}, pp("1F1B") | COMPILED),
    "pp2 x fsdp2 Interleaved1F1B, compiled, full checkpointing": (4, {}, pp("Interleaved1F1B") | COMPILED | FULL),
    "pp2 ZBVZeroBubble, compiled loss": (2, {}, pp("ZBVZeroBubble") | COMPILED | {"compile__components": ["loss"]}),
    "pp2 x fsdp2 1F1B, full checkpointing": (4, {}, pp("1F1B") | FULL),
    "pp2 x fsdp2 1F1B, checkpointing by operator": (4, {}, pp("1F1B") | BY_OPERATOR),
    "pp2 x fsdp2 1F1B, resharding": (4, {}, pp("1F1B", parallelism__fsdp_reshard_after_forward="always")),
    "pp2 x hsdp 2x2 ZBVZeroBubble": (8, MASKS, pp("ZBVZeroBubble", parallelism__data_parallel_replicate_degree=2)),
    "pp2 x fsdp2 x tp2 1F1B": (8, MASKS, pp("1F1B") | TP2),
}  # fmt: skip


def check(row: tuple[int, dict, dict]) -> None:
    world_size, both, added = row
    both = LAYERS | both
    report = parity.check(tiny(**both), tiny(**both | added), world_size=world_size)
    print({kind: f"{error:.1e}" for kind, error in report.errors.items()})


@pytest.mark.parametrize("row", ROWS)
def test_a_pipeline_trains_as_one_process_does(row):
    check(ROWS[row])


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
def test_every_combination_trains_as_one_process_does(row):
    check(SLOW[row])
