"""The Triton kernels of model/float8_casts.py. Imported where a kernel is launched: a CPU needs no Triton.

torchao 0.18 has kernels for the same casts. Two things rule them out. Its one for a single tensor takes the mean group
for the largest and leaves the rows beyond it unwritten, so skewed loads lose rows; its one for two tensors times its
variants anew for each number of rows, and under expert parallelism every step has another.
"""

import torch
import triton
import triton.language as tl

from model import float8_casts

TILE = {"ROWS": 128, "COLUMNS": 64, "SHARES": 8}
"""SHARES programs divide the rows of a group, so that one crowded expert does not keep the others waiting."""
ROUNDS_UP = tl.constexpr(float8_casts.ROUNDS_UP)
SMALLEST = tl.constexpr(float8_casts.SMALLEST)
SCALE = tl.constexpr(float8_casts.SCALE)
INVERSE = tl.constexpr(float8_casts.INVERSE)


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


def launch_cast_columns(
    x: torch.Tensor,
    ends: torch.Tensor,
    token: torch.Tensor | None,
    out: torch.Tensor,
    *,
    group_stride: int,
    column_stride: int,
) -> torch.Tensor:
    """Fill ``out`` as :func:`model.float8_casts.cast_columns` says; its inverse scales, float32 (E, N).

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
    _find_largest[grid](x, given, ends, largest, x.shape[0], columns, x.stride(0), **tile)
    _cast_transposed[grid](
        x, given, ends, largest, out, inverse, x.shape[0], columns, x.stride(0), group_stride, column_stride, **tile
    )
    return inverse
