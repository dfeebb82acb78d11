"""Operands of float8 products: e4m3 numbers with one scale a row, or one a column, along the sum of the product.

A scale is the largest power of two under which no element of its row exceeds 448, the format's largest (torchao's
rule). It is found from the bits of the row's largest magnitude, without a logarithm or a division, so eager, compiled
and Triton code agree on it to the bit. What is returned is its inverse, which a product multiplies its sums by; both
are exact.

Tensor cores read both operands along the sum. Where that is not how a tensor lies in memory the cast transposes it.
"""

import torch
import torch.nn.functional as F

from model.experts_grouped import swiglu, swiglu_backward
from model.fusion import fused

FLOAT8 = torch.float8_e4m3fn
ROUNDS_UP = 0x1FFFFF
"""Added to the bits of a float32 it carries into the exponent if the mantissa is above 1.75, that of 448."""
SMALLEST = 9
"""Exponents below are taken for this one, that scale and inverse stay normal: what is below 2^-118 becomes 0."""
SCALE, INVERSE = 262, 8
"""Scale 2^(8 - e) and inverse 2^(e - 8), e without bias: exponent fields 262 - exponent and exponent - 8."""


def scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and its inverse, float32, for each largest magnitude."""
    bits = largest.to(torch.float32).view(torch.int32)
    exponent = ((bits + ROUNDS_UP) >> 23).clamp(min=SMALLEST)
    return ((SCALE - exponent) << 23).view(torch.float32), ((exponent - INVERSE) << 23).view(torch.float32)


def _cast(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale, inverse = scales(rows.abs().amax(-1))
    return (rows.to(torch.float32) * scale[..., None]).to(FLOAT8), inverse


cast_rows = fused(_cast)
"""(..., K) -> float8 (..., K), inverse scales float32 (...): one a row."""


@fused
def cast_tokens(x: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather and cast at once: x (T, K), token int64 (R,) -> float8 (R, K), inverse scales (R,).

    A token of T, where there is none, gives some row.
    """
    return _cast(x[token.clamp(max=x.shape[0] - 1)])


@fused
def cast_swiglu(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`cast_rows` of :func:`model.experts_grouped.swiglu`: (R, 2 hidden) -> float8 (R, hidden), (R,)."""
    return _cast(swiglu(h))


@fused
def cast_swiglu_backward(
    h: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`model.experts_grouped.swiglu_backward`, and :func:`cast_rows` of the gradient of h after it."""
    d_h, active, d_weight = swiglu_backward(h, grad, weight)
    return d_h, active, d_weight, *_cast(d_h)


def cast_columns(
    x: torch.Tensor, ends: torch.Tensor, token: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a column and group of rows; transposed.

    Args:
        x: (R, N), or (T, N) with ``token``.
        ends: int32 (E,), the ends of the groups.
        token: int64 (R,): rows are gathered on the way. T means a row of zeros.

    Returns:
        float8 (N, R), of which rows past the last group are left unwritten; inverse scales (E, N).
    """
    return _cast_columns(x.contiguous(), ends, token)


def cast_matrices(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a column of each matrix; transposed: (E, K, N) -> float8 (E, N, K), inverse scales (E, N)."""
    return _cast_matrices(w.contiguous())


@torch.library.custom_op("ablation_trainer::cast_columns", mutates_args=())
def _cast_columns(x: torch.Tensor, ends: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Readable, for a CPU. The host reads ``ends``."""
    rows = x if token is None else F.pad(x, (0, 0, 0, 1))[token]
    out = rows.new_empty(rows.shape[1], rows.shape[0], dtype=FLOAT8)
    inverse = rows.new_empty(ends.shape[0], rows.shape[1], dtype=torch.float32)
    bounds = [0, *ends.tolist()]
    for group, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start == end:
            inverse[group] = scales(rows.new_zeros(()))[1]
        else:
            out[:, start:end], inverse[group] = _cast(rows[start:end].t())
    return out, inverse


@_cast_columns.register_kernel("cuda")
def _(x: torch.Tensor, ends: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    from model.float8_kernels import launch_cast_columns

    rows, columns = x.shape[0] if token is None else token.shape[0], x.shape[1]
    out = torch.empty(columns, rows, dtype=FLOAT8, device=x.device)
    return out, launch_cast_columns(x, ends, token, out, group_stride=0, column_stride=rows)


@_cast_columns.register_fake
def _(x: torch.Tensor, ends: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x.shape[0] if token is None else token.shape[0]
    inverse = x.new_empty(ends.shape[0], x.shape[1], dtype=torch.float32)
    return x.new_empty(x.shape[1], rows, dtype=FLOAT8), inverse


@torch.library.custom_op("ablation_trainer::cast_matrices", mutates_args=())
def _cast_matrices(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _cast(w.transpose(-2, -1).contiguous())


@_cast_matrices.register_kernel("cuda")
def _(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from model.float8_kernels import launch_cast_columns

    experts, rows, columns = w.shape
    out = torch.empty(experts, columns, rows, dtype=FLOAT8, device=w.device)
    ends = torch.arange(rows, rows * experts + 1, rows, dtype=torch.int32, device=w.device)
    strides = {"group_stride": (columns - 1) * rows, "column_stride": rows}
    return out, launch_cast_columns(w.flatten(0, 1), ends, None, out, **strides)


@_cast_matrices.register_fake
def _(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = w.shape
    inverse = w.new_empty(experts, columns, dtype=torch.float32)
    return w.new_empty(experts, columns, rows, dtype=FLOAT8), inverse
