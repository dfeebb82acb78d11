"""Triton kernels of model/row_reference.py: each result in one pass over memory, sums in float32.

Loaded on first use, on CUDA. All are bound by bytes, not by arithmetic, so what is tuned is how many 16-byte loads a
thread has under way: about 29 KB a multiprocessor cover an H200's memory latency. Blocks follow from the width alone;
nothing is tuned while a run waits. Widths are compile-time constants, numbers of rows are not, so that a number that
changes with each exchange compiles nothing.

Compared with the readable functions on the same device: gathers and zeros are equal to the bit, and so are sums over
slots, which are taken in the order of the slots without fused multiply-adds. SwiGLU, by another exponential, and dot
products over columns, in another order, agree to float32 rounding.
"""

import torch
import triton
import triton.language as tl

from model import row_reference

COLUMNS = 2048
"""Most columns of a program: 4 KiB of a bfloat16 row."""
ZEROS = 64
"""Programs that clear one expert's gradient between them."""


@triton.jit(do_not_specialize=["count"])
def _gather_rows(x, index, out, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + r, mask=r < count, other=0).to(tl.int64)
    mask = (r < count)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + source[:, None] * WIDTH + column[None, :], mask=mask)
    tl.store(out + r[:, None] * WIDTH + column[None, :], values, mask=mask)


@triton.jit
def _term(rows, row, weights, place, column, count, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr):
    """float32: the row that an assignment names, times its weight."""
    source = tl.load(row + place).to(tl.int64)
    end = tl.where(source < count, WIDTH, 0)  # an absent row is not read: it may not exist, or hold NaN
    values = tl.load(rows + source * WIDTH + column, mask=column < end, other=0.0).to(tl.float32)
    if WEIGHTED:
        # Nothing times a weight that is not finite would be NaN.
        values = values * tl.where(source < count, tl.load(weights + place), 0.0)
    return values


@triton.jit(do_not_specialize=["count"])
def _gather_sum(
    rows,
    row,
    weights,
    out,
    count,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if SLOTS <= 16:
        for s in tl.static_range(SLOTS):  # all loads are under way at once
            total += _term(rows, row, weights, t * SLOTS + s, column, count, WIDTH, WEIGHTED)
    else:  # an expert's choice of tokens: a place for each expert
        for s in range(SLOTS):
            total += _term(rows, row, weights, t * SLOTS + s, column, count, WIDTH, WEIGHTED)
    tl.store(out + t * WIDTH + column, total.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _swiglu(h, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    pair = 2 * start + tl.arange(0, 2 * BLOCK)
    both = tl.load(h + r * (2 * WIDTH) + pair, mask=pair < 2 * WIDTH, other=0.0)
    gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    column = start + tl.arange(0, BLOCK)
    active = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + r * WIDTH + column, active, mask=column < WIDTH)


@triton.jit
def _swiglu_backward(
    h,
    grad,
    weights,
    slot,
    ends,
    d_h,
    active,
    d_weights,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    if r < tl.load(ends + (EXPERTS - 1)):  # rows after that belong to no expert, and hold anything
        place = tl.load(slot + r)
        weight = tl.load(weights + place).to(tl.float32)
        product = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, WIDTH, BLOCK):
            pair = 2 * start + tl.arange(0, 2 * BLOCK)
            column = start + tl.arange(0, BLOCK)
            both = tl.load(h + r * (2 * WIDTH) + pair, mask=pair < 2 * WIDTH, other=0.0)
            gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
            gate, up = gate.to(tl.float32), up.to(tl.float32)
            g = tl.load(grad + r * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            out = silu * up
            product += g * out
            g = weight * g
            by_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
            by_pair = tl.reshape(tl.join(by_gate, g * silu), (2 * BLOCK,))
            tl.store(d_h + r * (2 * WIDTH) + pair, by_pair.to(d_h.dtype.element_ty), mask=pair < 2 * WIDTH)
            tl.store(active + r * WIDTH + column, (weight * out).to(active.dtype.element_ty), mask=column < WIDTH)
        tl.store(d_weights + place, tl.sum(product, axis=0))


@triton.jit
def _zero_empty(gradient, ends, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) == first:
        base = gradient + expert.to(tl.int64) * SIZE
        for start in range(0, SIZE, PROGRAMS * BLOCK):
            at = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            tl.store(base + at, tl.zeros([BLOCK], dtype=gradient.dtype.element_ty), mask=at < SIZE)


def _columns(width: int, most: int = COLUMNS) -> int:
    return min(triton.next_power_of_2(width), most)


def _warps(elements: int, a_thread: int) -> int:
    return max(1, min(8, elements // (32 * a_thread)))


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index]: (T, D), int64 (R,) -> (R, D)."""
    x, index = x.contiguous(), index.contiguous()
    out = x.new_empty(len(index), x.shape[1])
    if out.numel():
        rows, block = 4, _columns(x.shape[1])
        grid = (triton.cdiv(len(index), rows), triton.cdiv(x.shape[1], block))
        _gather_rows[grid](
            x, index, out, len(index), WIDTH=x.shape[1], ROWS=rows, BLOCK=block, num_warps=_warps(rows * block, 32)
        )
    return out


def gather_sum(rows: torch.Tensor, row: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`model.row_reference.gather_sum`."""
    rows, row = rows.contiguous(), row.contiguous()
    (tokens, slots), width = row.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    if out.numel():
        block = _columns(width)
        _gather_sum[tokens, triton.cdiv(width, block)](
            rows,
            row,
            row if weights is None else weights.contiguous(),
            out,
            len(rows),
            WIDTH=width,
            SLOTS=slots,
            WEIGHTED=weights is not None,
            BLOCK=block,
            num_warps=_warps(block, 8 if slots >= 4 else 16),
            enable_fp_fusion=False,
        )
    return out


def swiglu(h: torch.Tensor) -> torch.Tensor:
    """:func:`model.row_reference.swiglu`."""
    width = h.shape[1] // 2
    out = h.new_empty(len(h), width)
    if out.numel():
        block = _columns(width, 1024)
        grid = (len(h), triton.cdiv(width, block))
        _swiglu[grid](h.contiguous(), out, WIDTH=width, BLOCK=block, num_warps=_warps(block, 8))
    return out


def swiglu_backward(
    h: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`model.row_reference.swiglu_backward`; rows of no expert are left unwritten."""
    d_h, active = h.new_empty(h.shape), h.new_empty(grad.shape)
    d_weights = weights.new_zeros(weights.shape)
    if grad.numel():
        block = _columns(grad.shape[1], 1024)
        _swiglu_backward[(len(h),)](
            h.contiguous(),
            grad.contiguous(),
            weights.contiguous(),
            slot.contiguous(),
            ends,
            d_h,
            active,
            d_weights,
            EXPERTS=len(ends),
            WIDTH=grad.shape[1],
            BLOCK=block,
            num_warps=_warps(block, 8),
        )
    return d_h, active, d_weights


def zero_empty_(gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """:func:`model.row_reference.zero_empty_`: writes to experts without rows alone, and reads ``ends`` alone."""
    if not gradient.is_contiguous():  # grouped_mm pads rows whose length is no multiple of 16 bytes
        return row_reference.zero_empty_(gradient, ends)
    _zero_empty[len(ends), ZEROS](
        gradient, ends, SIZE=gradient[0].numel(), PROGRAMS=ZEROS, BLOCK=2048, num_warps=_warps(2048, 8)
    )
    return gradient
