"""Rows of the parity harness for losses: each trains as all logits and torch's cross entropy on one process do.

Chunks divide neither tokens nor vocabulary, and masked boundary labels leave rows out.
"""

import pytest

from tests import parity
from tests.parallelisms.test_parity_data import tiny

ROWS = {"loss__implementation": "row_chunked", "loss__rows_per_chunk": 27}
COLUMNS = {"loss__implementation": "vocab_chunked", "loss__columns_per_chunk": 45}
TORCH = {"loss__implementation": "torch"}
MODEL = {"loss__soft_cap": 2.0, "loss__z_loss_coeff": 0.1, "data__document_mask": True,
         "data__mask_boundary_labels": True}  # fmt: skip
TIED = {"model__enable_weight_tying": True}
TP2 = {"parallelism__tensor_parallel_degree": 2}
DDP2 = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
PP2 = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "1F1B"}
ZERO_BUBBLE = PP2 | {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble", "model__n_layers": 4}
COMPILED = {"compile__enable": True, "compile__backend": "aot_eager", "compile__components": ["loss"]}
QUICK = {
    "one process, row_chunked": (1, ROWS, {}),
    "one process, vocab_chunked": (1, COLUMNS, {}),
    "fsdp2, row_chunked, tied": (2, ROWS, TIED),
    "fsdp2, vocab_chunked": (2, COLUMNS, {}),
    "tp2, row_chunked": (2, ROWS | TP2, {}),
    "tp2, vocab_chunked, tied": (2, COLUMNS | TP2, TIED),
    "pp2 1F1B, row_chunked": (2, ROWS | PP2, {}),
    "pp2 ZBVZeroBubble, vocab_chunked": (2, COLUMNS | ZERO_BUBBLE, {"model__n_layers": 4}),
}
SLOW = {
    "tp2, torch": (2, TORCH | TP2, {}),
    "tp2, torch, compiled": (2, TORCH | TP2 | COMPILED, {}),
    "tp2, logits gathered": (2, TP2 | {"parallelism__disable_loss_parallel": True}, {}),
    "ddp2, row_chunked, tied": (2, ROWS | DDP2, TIED),
    "ddp2, vocab_chunked": (2, COLUMNS | DDP2, {}),
    "fsdp1, row_chunked": (2, ROWS | {"parallelism__fsdp_version": 1}, {}),
    "pp2 ZBVZeroBubble, row_chunked": (2, ROWS | ZERO_BUBBLE, {"model__n_layers": 4}),
    "pp2 1F1B, vocab_chunked, tied": (2, COLUMNS | PP2, TIED),
    "one process, row_chunked, compiled": (1, ROWS | COMPILED, {}),
    "one process, vocab_chunked, compiled": (1, COLUMNS | COMPILED, {}),
    "fsdp2 x tp2, row_chunked": (4, ROWS | TP2, TIED),
    "cp2, vocab_chunked": (2, COLUMNS | {"parallelism__context_parallel_degree": 2}, {}),
}


def check(rows: dict, row: str) -> None:
    world_size, layout, model = rows[row]
    parity.check(tiny(**MODEL | model), tiny(**MODEL | model | layout), world_size=world_size)


@pytest.mark.parametrize("row", QUICK)
def test_a_loss_trains_as_torchs_does(row):
    check(QUICK, row)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
def test_losses_in_every_other_layout(row):
    check(SLOW, row)
