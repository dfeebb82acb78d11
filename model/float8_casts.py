"""Operands of float8 products: e4m3 numbers with one scale a row, or one a column, along the sum of the product.

A scale is the largest power of two under which no element of its row exceeds 448, the format's largest (torchao's
rule). It is found from the bits of the row's largest magnitude, without a logarithm or a division, so that every device
agrees on it to the bit. What is returned is its inverse, which a product multiplies its sums by; both are exact.

Tensor cores read both operands along the sum. Where that is not how a tensor lies in memory the cast transposes it.

Each cast is one operator: on CUDA a kernel of model/float8_kernels.py, elsewhere the readable function here.
"""

import functools

import torch
import torch.nn.functional as F

from model import row_reference

FLOAT8 = torch.float8_e4m3fn
ROUNDS_UP = 0x1FFFFF
"""Added to the bits of a float32 it carries into the exponent if the mantissa is above 1.75, that of 448."""
SMALLEST = 9
"""Exponents below are taken for this one, that scale and inverse stay normal: what is below 2^-118 becomes 0."""
SCALE, INVERSE = 262, 8
"""Scale 2^(8 - e) and inverse 2^(e - 8), e without bias: exponent fields 262 - exponent and exponent - 8."""

Cast = tuple[torch.Tensor, torch.Tensor]
"""float8 numbers, and the float32 inverse scales of their rows."""
operator = functools.partial(torch.library.custom_op, mutates_args=())


def scales(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and its inverse, float32, for each largest magnitude."""
    bits = largest.to(torch.float32).view(torch.int32)
    exponent = ((bits + ROUNDS_UP) >> 23).clamp(min=SMALLEST)
    return ((SCALE - exponent) << 23).view(torch.float32), ((exponent - INVERSE) << 23).view(torch.float32)


def cast(rows: torch.Tensor) -> Cast:
    """(..., K) -> float8 (..., K), inverse scales (...), in plain operators."""
    scale, inverse = scales(rows.abs().amax(-1))
    return (rows.to(torch.float32) * scale[..., None]).to(FLOAT8), inverse


def _empty(like: torch.Tensor, rows: int, columns: int) -> Cast:
    numbers = torch.empty(rows, columns, dtype=FLOAT8, device=like.device)
    return numbers, torch.empty(rows, dtype=torch.float32, device=like.device)


@operator("ablation_trainer::cast_rows")
def cast_rows(x: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a row: (R, K) -> float8 (R, K), inverse scales (R,).

    Args:
        token: int64 (R,): rows are gathered on the way, from ``x`` (T, K). T gives some row.
    """
    return cast(x if token is None else x[token.clamp(max=len(x) - 1)])


@cast_rows.register_kernel("cuda")
def _(x: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    from model.float8_kernels import cast_rows

    return cast_rows(x.contiguous(), token, *_empty(x, len(x if token is None else token), x.shape[1]))


@cast_rows.register_fake
def _(x: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(x, (x if token is None else token).shape[0], x.shape[1])


@operator("ablation_trainer::cast_swiglu")
def cast_swiglu(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`cast_rows` of :func:`model.row_reference.swiglu`: (R, 2 hidden) -> float8 (R, hidden), (R,)."""
    return cast(row_reference.swiglu(h))


@cast_swiglu.register_kernel("cuda")
def _(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from model.float8_kernels import cast_swiglu

    return cast_swiglu(h.contiguous(), *_empty(h, len(h), h.shape[1] // 2))


@cast_swiglu.register_fake
def _(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(h, h.shape[0], h.shape[1] // 2)


@operator("ablation_trainer::cast_swiglu_backward")
def cast_swiglu_backward(
    h: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`model.row_reference.swiglu_backward`, and :func:`cast_rows` of the first of its results after them."""
    d_h, active, d_weights = row_reference.swiglu_backward(h, grad, weights, slot, ends)
    return d_h, active, d_weights, *cast(d_h)


@cast_swiglu_backward.register_kernel("cuda")
def _(
    h: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from model.float8_kernels import cast_swiglu_backward

    out = h.new_empty(h.shape), grad.new_empty(grad.shape), torch.zeros_like(weights), *_empty(h, *h.shape)
    return cast_swiglu_backward(h.contiguous(), grad.contiguous(), weights, slot, ends, *out)


@cast_swiglu_backward.register_fake
def _(
    h: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, width = h.shape
    return h.new_empty(rows, width), grad.new_empty(grad.shape), torch.empty_like(weights), *_empty(h, rows, width)


@operator("ablation_trainer::cast_columns")
def cast_columns(x: torch.Tensor, ends: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a column and group of rows; transposed. On a CPU the host reads ``ends``.

    Args:
        x: (R, N), or (T, N) with ``token``.
        ends: int32 (E,), the ends of the groups, multiples of 16.
        token: int64 (R,): rows are gathered on the way. T means a row of zeros.

    Returns:
        float8 (N, R), of which rows past the last group are left unwritten; inverse scales (E, N).
    """
    rows = x if token is None else F.pad(x, (0, 0, 0, 1))[token]
    out = rows.new_empty(rows.shape[1], rows.shape[0], dtype=FLOAT8)
    inverse = rows.new_empty(ends.shape[0], rows.shape[1], dtype=torch.float32)
    bounds = [0, *ends.tolist()]
    for group, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start == end:
            inverse[group] = scales(rows.new_zeros(()))[1]
        else:
            out[:, start:end], inverse[group] = cast(rows[start:end].t())
    return out, inverse


@cast_columns.register_kernel("cuda")
def _(x: torch.Tensor, ends: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    from model.float8_kernels import cast_columns

    rows, columns = len(x if token is None else token), x.shape[1]
    out = torch.empty(columns, rows, dtype=FLOAT8, device=x.device)
    return cast_columns(x.contiguous(), ends, token, out, group_stride=0, column_stride=rows)


@cast_columns.register_fake
def _(x: torch.Tensor, ends: torch.Tensor, token: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (x if token is None else token).shape[0]
    inverse = x.new_empty(ends.shape[0], x.shape[1], dtype=torch.float32)
    return x.new_empty(x.shape[1], rows, dtype=FLOAT8), inverse


@operator("ablation_trainer::cast_matrices")
def cast_matrices(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale a column of each matrix; transposed: (E, K, N) -> float8 (E, N, K), inverse scales (E, N)."""
    return cast(w.transpose(-2, -1).contiguous())


@cast_matrices.register_kernel("cuda")
def _(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from model.float8_kernels import cast_columns

    experts, rows, columns = w.shape
    out = torch.empty(experts, columns, rows, dtype=FLOAT8, device=w.device)
    ends = torch.arange(rows, rows * experts + 1, rows, dtype=torch.int32, device=w.device)
    strides = {"group_stride": (columns - 1) * rows, "column_stride": rows}
    return cast_columns(w.contiguous().flatten(0, 1), ends, None, out, **strides)


@cast_matrices.register_fake
def _(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, rows, columns = w.shape
    inverse = w.new_empty(experts, columns, dtype=torch.float32)
    return w.new_empty(experts, columns, rows, dtype=FLOAT8), inverse
