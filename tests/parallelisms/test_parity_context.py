"""Rows of the parity harness for context parallelism: every method and layout, alone and with every other technique."""

import pytest

from tests import parity
from tests.parallelisms.test_parity_data import tiny

CP2, CP4 = ({"parallelism__context_parallel_degree": n} for n in (2, 4))
METHOD = {name: {"parallelism__context_parallel_method": name} for name in ("ring", "allgather", "ulysses")}
CONTIGUOUS = {"parallelism__context_parallel_layout": "contiguous"}
TP2, PP2 = {"parallelism__tensor_parallel_degree": 2}, {"parallelism__pipeline_parallel_degree": 2}
HSDP = {"parallelism__data_parallel_replicate_degree": 2}
FULL = {"activation_checkpoint__mode": "full"}
BY_OPERATOR = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
COMPILE = {"compile__enable": True, "compile__backend": "aot_eager"}
ZERO_BUBBLE = {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble", "model__n_layers": 4}
MASKED = {
    "model__enable_weight_tying": True, "model__qk_norm": True,
    "data__document_mask": True, "data__mask_boundary_labels": True,
}  # fmt: skip
DDP2 = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
SMALL = {"training__local_batch_size": 1}
KV4 = {"model__n_kv_heads": 4}
ROWS = {
    "ring 2": (2, CP2, {}),
    "fsdp2 x allgather 2, masks, contiguous": (4, CP2 | METHOD["allgather"] | CONTIGUOUS, MASKED),
    "ulysses 2 x tp2, by operator": (4, CP2 | METHOD["ulysses"] | TP2 | BY_OPERATOR, KV4),
    "pp2, ring": (4, CP2 | PP2, MASKED),
}
EVERY = {
    f"{name} {n}, {layout}": (n, {"parallelism__context_parallel_degree": n} | METHOD[name] | change, MASKED)
    for name in METHOD
    for n in (2, 4)
    for layout, change in {"zigzag": {}, "contiguous": CONTIGUOUS}.items()
    if (name, layout) != ("ulysses", "contiguous")
}
COMPOSED = {
    f"{what}, {name}": (world, CP2 | METHOD[name] | layout, model)
    for name in METHOD
    for what, world, layout, model in (
        ("fsdp2", 4, {}, MASKED),
        ("copies", 4, DDP2, MASKED),
        ("tp2", 4, TP2, MASKED | KV4),
        ("pp2", 4, PP2, MASKED),
        ("full checkpointing", 2, FULL, MASKED),
        ("checkpointing by operator", 2, BY_OPERATOR, MASKED),
        ("compiled", 2, COMPILE, MASKED),
        ("compiled, full checkpointing", 2, COMPILE | FULL, {}),
        ("compiled, by operator", 2, COMPILE | BY_OPERATOR, {}),
        ("every 2nd block checkpointed", 2, {"activation_checkpoint__mode": "selective"}, {}),
        ("tp2, compiled", 4, TP2 | COMPILE, KV4),
    )
}
WIDE = {
    "hsdp 2x2 x ring 2": (8, CP2 | HSDP, MASKED | SMALL),
    "hsdp x ring 2 x tp2": (8, CP2 | DDP2 | TP2, MASKED | SMALL | KV4),
    "hsdp x ulysses 2 x tp2": (8, CP2 | METHOD["ulysses"] | DDP2 | TP2, MASKED | SMALL | KV4),
    "fsdp2 x allgather 2 x tp2, full checkpointing": (8, CP2 | METHOD["allgather"] | TP2 | FULL, MASKED | SMALL | KV4),
    "fsdp2 x ring 2 x pp2, zero bubble": (8, CP2 | PP2 | ZERO_BUBBLE, MASKED),
    "ring 4 x pp2, 1f1b": (8, CP4 | PP2, MASKED),
    "fsdp2 x ring 4": (8, CP4, {}),
    "fsdp2 kept after forward x ring 2": (4, CP2 | {"parallelism__zero_stage": 2}, MASKED),
}
SLOW = {name: row for name, row in (EVERY | COMPOSED | WIDE).items() if name not in ROWS}


def check(rows, row):
    world_size, layout, model = rows[row]
    model = model | {key: value for key, value in layout.items() if key.startswith("model__")}
    return parity.check(tiny(**model), tiny(**model | layout), world_size=world_size)


@pytest.mark.parametrize("row", ROWS)
def test_ranks_that_share_sequences_train_as_one_process_does(row):
    check(ROWS, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
def test_every_other_combination(row):
    check(SLOW, row)
