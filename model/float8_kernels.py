"""The Triton kernels of model/float8_casts.py. Imported where a kernel is launched: a CPU needs no Triton.

Rows are cast in one pass, each held whole by one program: gathered, or computed, and cast before anything is written.
Columns within a group are too long for that and take two passes over memory, one to find their largest.

torchao 0.18 has kernels for the same casts. Two things rule them out. Its one for a single tensor takes the mean group
for the largest and leaves the rows beyond it unwritten, so skewed loads lose rows; its one for two tensors times its
variants anew for each number of rows, and under expert parallelism every step has another.
"""

import torch
import triton
import triton.language as tl

from model import float8_casts
from model.float8_casts import Cast

TILE = {"ROWS": 128, "COLUMNS": 64, "SHARES": 8}
"""SHARES programs divide the rows of a group, so that one crowded expert does not keep the others waiting."""
ROUNDS_UP = tl.constexpr(float8_casts.ROUNDS_UP)
SMALLEST = tl.constexpr(float8_casts.SMALLEST)
SCALE = tl.constexpr(float8_casts.SCALE)
INVERSE = tl.constexpr(float8_casts.INVERSE)


@triton.jit
def _write_row(out, inverse, r, values, column, WIDTH: tl.constexpr):
    """Cast float32 ``values`` (of which ``column`` tells the place) into row r."""
    bits = tl.max(tl.abs(values), axis=0).to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits + ROUNDS_UP) >> 23, SMALLEST)
    scale = ((-exponent + SCALE) << 23).to(tl.float32, bitcast=True)
    tl.store(out + r * WIDTH + column, (values * scale).to(tl.float8e4nv), mask=column < WIDTH)
    tl.store(inverse + r, ((exponent - INVERSE) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _pairs(h, r, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Gate and up of row r, float32."""
    pair = tl.arange(0, 2 * BLOCK)
    both = tl.load(h + r * (2 * WIDTH) + pair, mask=pair < 2 * WIDTH, other=0.0)
    gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _cast_rows(
    x, token, out, inverse, tokens, GATHER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    source = r
    if GATHER:
        source = tl.minimum(tl.load(token + r), tokens.to(tl.int64) - 1)
    column = tl.arange(0, BLOCK)
    values = tl.load(x + source * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    _write_row(out, inverse, r, values, column, WIDTH)


@triton.jit
def _cast_swiglu(h, out, inverse, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    gate, up = _pairs(h, r, WIDTH, BLOCK)
    active = (gate * tl.sigmoid(gate) * up).to(h.dtype.element_ty).to(tl.float32)
    _write_row(out, inverse, r, active, tl.arange(0, BLOCK), WIDTH)


@triton.jit
def _cast_swiglu_backward(
    h, grad, weights, slot, ends, d_h, active, d_weights, out, inverse,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    if r < tl.load(ends + (EXPERTS - 1)):  # rows after that belong to no expert, and hold anything
        column, pair = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
        gate, up = _pairs(h, r, WIDTH, BLOCK)
        g = tl.load(grad + r * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        place = tl.load(slot + r)
        weight = tl.load(weights + place).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        tl.store(d_weights + place, tl.sum(g * silu * up, axis=0))
        tl.store(active + r * WIDTH + column, (weight * silu * up).to(active.dtype.element_ty), mask=column < WIDTH)
        g = weight * g
        by_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        by_pair = tl.reshape(tl.join(by_gate, g * silu), (2 * BLOCK,)).to(d_h.dtype.element_ty)
        tl.store(d_h + r * (2 * WIDTH) + pair, by_pair, mask=pair < 2 * WIDTH)
        _write_row(out, inverse, r, by_pair.to(tl.float32), pair, 2 * WIDTH)


@triton.jit
def _load(x, token, tokens, row, column, within, stride, GATHER: tl.constexpr):
    """A tile, float32; zeros where it ends, and in rows without a token."""
    source = row.to(tl.int64)
    if GATHER:
        source = tl.load(token + row, mask=tl.max(within.to(tl.int32), axis=1) > 0, other=0)
        within = within & (source < tokens)[:, None]
    return tl.load(x + source[:, None] * stride + column[None, :], mask=within, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _find_largest(
    x, token, ends, largest, tokens, columns, stride,
    GATHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of each column in a share of a group's rows, into ``largest`` (E, N) as bits, which order as
    the floats do where these are not negative.
    """
    group, share = tl.program_id(1), tl.program_id(2)
    start = tl.multiple_of(tl.load(ends + group - 1, mask=group > 0, other=0), 16)
    end = tl.multiple_of(tl.load(ends + group), 16)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    found = tl.zeros((COLUMNS,), tl.float32)
    for first in range(start + share * ROWS, end, SHARES * ROWS):
        row = first + tl.arange(0, ROWS)
        within = (row < end)[:, None] & (column < columns)[None, :]
        tile = _load(x, token, tokens, row, column, within, stride, GATHER)
        found = tl.maximum(found, tl.max(tl.abs(tile), axis=0))
    tl.atomic_max(largest + group * columns + column, found.to(tl.int32, bitcast=True), mask=column < columns)


@triton.jit(do_not_specialize=["tokens"])
def _cast_transposed(
    x, token, ends, largest, out, inverse, tokens, columns, stride, group_stride, column_stride,
    GATHER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Element (row, column) of a group goes to group * group_stride + column * column_stride + row of ``out``."""
    group, share = tl.program_id(1), tl.program_id(2)
    start = tl.multiple_of(tl.load(ends + group - 1, mask=group > 0, other=0), 16)
    end = tl.multiple_of(tl.load(ends + group), 16)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS).to(tl.int64)
    bits = tl.load(largest + group * columns + column, mask=column < columns, other=0)
    exponent = tl.maximum((bits + ROUNDS_UP) >> 23, SMALLEST)
    scale = ((-exponent + SCALE) << 23).to(tl.float32, bitcast=True)
    if share == 0:
        inverses = ((exponent - INVERSE) << 23).to(tl.float32, bitcast=True)
        tl.store(inverse + group * columns + column, inverses, mask=column < columns)
    target = out + group.to(tl.int64) * group_stride + column[:, None] * column_stride
    for first in range(start + share * ROWS, end, SHARES * ROWS):
        row = first + tl.arange(0, ROWS)
        within = (row < end)[:, None] & (column < columns)[None, :]
        tile = _load(x, token, tokens, row, column, within, stride, GATHER) * scale[None, :]
        tl.store(target + row[None, :], tl.trans(tile.to(tl.float8e4nv)), mask=tl.trans(within))


def _of_row(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def cast_rows(x: torch.Tensor, token: torch.Tensor | None, out: torch.Tensor, inverse: torch.Tensor) -> Cast:
    """:func:`model.float8_casts.cast_rows` into ``out`` and ``inverse``, which are returned."""
    _cast_rows[(len(out),)](
        x, out if token is None else token, out, inverse, len(x), GATHER=token is not None, **_of_row(x.shape[1])
    )
    return out, inverse


def cast_swiglu(h: torch.Tensor, out: torch.Tensor, inverse: torch.Tensor) -> Cast:
    """:func:`model.float8_casts.cast_swiglu` into ``out`` and ``inverse``, which are returned."""
    _cast_swiglu[(len(out),)](h, out, inverse, **_of_row(out.shape[1]))
    return out, inverse


def cast_swiglu_backward(
    h: torch.Tensor,
    grad: torch.Tensor,
    weights: torch.Tensor,
    slot: torch.Tensor,
    ends: torch.Tensor,
    *results: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """:func:`model.float8_casts.cast_swiglu_backward` into the five ``results``, which are returned. Rows past the
    last expert's are left unwritten.
    """
    of_row = _of_row(grad.shape[1])
    _cast_swiglu_backward[(len(h),)](h, grad, weights, slot, ends, *results, EXPERTS=len(ends), **of_row)
    return results


def cast_columns(
    x: torch.Tensor,
    ends: torch.Tensor,
    token: torch.Tensor | None,
    out: torch.Tensor,
    *,
    group_stride: int,
    column_stride: int,
) -> Cast:
    """:func:`model.float8_casts.cast_columns` into ``out``, which is returned with its inverse scales.

    Args:
        x: (R, N) or, with ``token`` int64 (R,), (T, N); rows of N adjacent numbers.
        ends: int32 (E,), multiples of 16, as the strides are: 16 numbers are written at once.
        group_stride, column_stride: see :func:`_cast_transposed`.
    """
    groups, columns = ends.shape[0], x.shape[1]
    largest = torch.zeros(groups, columns, dtype=torch.int32, device=x.device)
    inverse = torch.empty(groups, columns, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(columns, TILE["COLUMNS"]), groups, TILE["SHARES"])
    given, gather = (ends, False) if token is None else (token, True)
    tile = {**TILE, "GATHER": gather, "num_warps": 8}
    _find_largest[grid](x, given, ends, largest, len(x), columns, x.stride(0), **tile)
    _cast_transposed[grid](
        x, given, ends, largest, out, inverse, len(x), columns, x.stride(0), group_stride, column_stride, **tile
    )
    return out, inverse
