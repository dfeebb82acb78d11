"""Rows of the parity harness for expert parallelism, alone and with every other technique."""

import pytest

from tests import parity
from tests.parallelisms.test_parity_context import CP2, METHOD
from tests.parallelisms.test_parity_data import DIRECT
from tests.parallelisms.test_parity_tensor import BY_OPERATOR, COMPILE, EXPERTS, FULL, TP2, sparse

EP2 = {"parallelism__expert_parallel_degree": 2}
EP4 = {"parallelism__expert_parallel_degree": 4}
ONCE = {"moe__dispatcher": "all_to_all_dedup"}
OVERLAP = {"moe__comm_overlap": "shared_expert"}
PARTS = {"moe__comm_overlap": "experts", "moe__comm_overlap_degree": 3}
COPIES = {"parallelism__data_parallel_replicate_degree": 2}
NARROW = {"parallelism__expert_tensor_parallel_degree": 2}
KEPT = {"parallelism__zero_stage": 2}
PP2 = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_microbatch_size": 2}
AUX, SEQUENCE = EXPERTS["aux loss, z-loss"], EXPERTS["sequence-wise, masked labels"]
SHARED, CAPACITY = EXPERTS["noise, shared expert, dense layer"], EXPERTS["capacity, exact load"]
SIX = {"moe__num_experts": 6}
EIGHT = {"training__local_batch_size": 1}
ONE_BY_ONE = {"parallelism__pipeline_parallel_microbatch_size": 1}
# name -> (ranks, layout, model). Batch 2 under TP: a router gradient that is not whole, or rows out of order, show.
ROWS = {
    "ep2, aux loss": (2, EP2, AUX),
    "ep2, by operator": (2, EP2 | BY_OPERATOR, AUX),
    "ep2, once a rank, full checkpointing, capacity": (2, EP2 | ONCE | FULL, CAPACITY),
    "hsdp 2x2 x ep2, overlap": (4, COPIES | EP2 | OVERLAP, SHARED),
    "fsdp2 x tp2 x ep4, once a rank": (4, TP2 | EP4 | ONCE, AUX),
    "fsdp2 x ep2, experts in parts, full checkpointing": (4, EP2 | PARTS | FULL, AUX | SIX),
    "fsdp2 x tp2 x ep2, experts narrowed": (4, TP2 | EP2 | NARROW, AUX),
}
SLOW = {
    "ep2, experts in parts": (2, EP2 | PARTS, SHARED | SIX),
    "ep2, experts in parts, loop, by operator": (2, EP2 | PARTS | BY_OPERATOR, AUX | SIX | {"moe__experts": "loop"}),
    "ep2, experts in parts, capacity": (2, EP2 | PARTS, CAPACITY | SIX),
    "ep2, experts in parts, compiled": (2, EP2 | PARTS | COMPILE, AUX | SIX),
    "fsdp2 x ep2, experts in parts": (4, EP2 | PARTS, SHARED | SIX),
    "fsdp2 x ep2, experts in parts, direct": (4, EP2 | PARTS | DIRECT, AUX | SIX),
    "ep4, experts in parts": (4, EP4 | PARTS, AUX | {"moe__num_experts": 8}),
    "hsdp 2x2 x ep2, experts in parts": (4, COPIES | EP2 | PARTS, AUX | SIX),
    "fsdp2 x tp2 x ep4, experts in parts": (4, TP2 | EP4 | PARTS, AUX | {"moe__num_experts": 8}),
    "fsdp2 x tp2 x ep2, experts narrowed, in parts": (4, TP2 | EP2 | NARROW | PARTS, AUX | SIX),
    "cp2 x ep2, experts in parts": (2, CP2 | EP2 | PARTS, AUX | SIX),
    "pp2 x ep2, experts in parts": (4, PP2 | EP2 | PARTS, AUX | SIX),
    "ep2, sequence-wise, masked labels": (2, EP2, SEQUENCE),
    "ep2, once a rank, sequence-wise, masked labels": (2, EP2 | ONCE, SEQUENCE),
    "ep2, loop": (2, EP2 | ONCE, {"moe__experts": "loop"}),
    "ep2, capacity by position": (2, EP2 | ONCE, {"moe__capacity": "position", "moe__capacity_factor": 0.5}),
    "ep2, experts choose": (2, EP2 | ONCE, {"moe__routing": "expert_choice", "moe__balance": "none"}),
    "ep2, quantile": (2, EP2, {"moe__balance": "quantile"}),
    "ep2, kept after forward, tied": (2, EP2 | KEPT, {"model__enable_weight_tying": True}),
    "fsdp2 x ep2, by operator": (4, EP2 | BY_OPERATOR, AUX),
    "ep2, once a rank, overlap, by operator": (2, EP2 | ONCE | OVERLAP | BY_OPERATOR, SHARED),
    "ep2, every 2nd block checkpointed": (2, EP2 | {"activation_checkpoint__mode": "selective"}, AUX),
    "ep2, compiled": (2, EP2 | COMPILE, AUX | {"moe__experts": "grouped_mm"}),
    "ep2, once a rank, compiled, full checkpointing, overlap": (2, EP2 | ONCE | COMPILE | FULL | OVERLAP, SHARED),
    "ep2, direct": (2, EP2 | DIRECT, AUX),
    "ep4": (4, EP4, AUX),
    "fsdp2 x ep2": (4, EP2, AUX),
    "fsdp2 x ep2, once a rank, full checkpointing": (4, EP2 | ONCE | FULL, SHARED),
    "fsdp4 x ep2, rows of experts": (4, EP2, AUX | {"moe__num_experts": 6}),
    "fsdp2 x ep2, prefetch": (4, EP2 | {"parallelism__fsdp_prefetch_blocks": 2}, AUX),
    "fsdp2 x ep2, direct": (4, EP2 | DIRECT, AUX),
    "fsdp4 x ep2, rows of experts, direct": (4, EP2 | DIRECT, AUX | {"moe__num_experts": 6}),
    "hsdp 2x2 x ep2, once a rank": (4, COPIES | EP2 | ONCE, AUX),
    "tp2 x ep2": (2, TP2 | EP2, AUX),
    "tp2 x ep2, full checkpointing, sequence-wise": (2, TP2 | EP2 | FULL, SEQUENCE),
    "tp2 x ep2, by operator, overlap": (2, TP2 | EP2 | ONCE | BY_OPERATOR | OVERLAP, SHARED),
    "tp2 x ep2, compiled": (2, TP2 | EP2 | COMPILE, AUX),
    "fsdp2 x tp2 x ep2": (4, TP2 | EP2, AUX),
    "fsdp2 x tp2 x ep2, experts narrowed, once a rank, capacity": (4, TP2 | EP2 | NARROW | ONCE, CAPACITY),
    "fsdp4 x tp2 x ep2": (8, TP2 | EP2, AUX | EIGHT),
    "fsdp4 x tp2 x ep4, once a rank, full checkpointing": (8, TP2 | EP4 | ONCE | FULL, SHARED | EIGHT),
    "fsdp4 x tp2 x ep2, experts narrowed": (8, TP2 | EP2 | NARROW, AUX | EIGHT),
    "hsdp 2x2 x tp2 x ep4": (8, COPIES | TP2 | EP4, AUX | EIGHT),
    "cp2 x ep2": (2, CP2 | EP2, AUX),
    "cp2 x ep2, once a rank, overlap, all-gather, full checkpointing": (
        2, CP2 | EP2 | ONCE | OVERLAP | FULL | METHOD["allgather"], SHARED,
    ),
    "fsdp2 x cp2 x ep4": (4, CP2 | EP4, AUX),
    "fsdp2 x cp2 x tp2 x ep4, once a rank": (8, CP2 | TP2 | EP4 | ONCE, AUX),
    "pp2 x ep2": (4, PP2 | EP2, AUX),
    "fsdp4 x pp2 x ep2": (8, PP2 | ONE_BY_ONE | EP2 | ONCE, AUX | EIGHT),
    "pp2 x tp2 x ep2": (4, PP2 | TP2 | EP2, AUX),
}  # fmt: skip


def check(rows, row):
    world_size, layout, model = rows[row]
    parity.check(sparse(**model), sparse(**model | layout), world_size=world_size)


@pytest.mark.parametrize("row", ROWS)
def test_ranks_with_different_experts_train_as_one_process_does(row):
    check(ROWS, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
def test_every_other_combination(row):
    check(SLOW, row)
