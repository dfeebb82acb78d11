"""The hot parts of a training step at the shapes of a workload: what is called, and the bytes and FLOPs that it needs.

Bytes are those of inputs that are read and results that are written once, in the dtype that training has there; of a
forward and backward pass together, what the backward pass needs is read again and nothing else is kept. FLOPs are those
of the matrix products. T tokens, R = T x top-k rows of experts.
"""

import itertools

from benchmarks import parts_dense as dense
from benchmarks import parts_experts as experts
from benchmarks.part import Row, Setting


def rows_of(setting: Setting) -> list[Row]:
    """Every row of a workload, in the order in which a step runs through them."""
    groups = [dense.norm_rows(setting), dense.rope_rows(setting), dense.attention_rows(setting)]
    if setting.shape.moe is None:
        groups.append(dense.dense_swiglu_rows(setting))
    else:
        of_experts = (experts.router_rows, experts.dispatch_rows, experts.products_rows, experts.experts_rows)
        groups += [rows(setting) for rows in of_experts]
    return list(itertools.chain(*groups, dense.head_rows(setting), dense.update_rows(setting)))


PARTS = (
    "RMSNorm",
    "RoPE",
    "attention",
    "SwiGLU",
    "router",
    "plan",
    "gather",
    "combine",
    "expert SwiGLU",
    "expert product",
    "experts",
    "head and loss",
    "norm and clip",
    "AdamW",
)
"""What ``Row.part`` may be."""
