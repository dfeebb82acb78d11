"""Every kernel of model/float8_kernels.py against the readable casts, on a CPU: run as a program, Triton interprets
them.

Prints a line "name<tab>error" for each tensor that is compared, on inputs drawn anew each time: 0 where they are equal
to the bit. Triton's interpreter (3.6 to 3.9) loses the carry where rounding to float8 reaches the next power of two, so
numbers that are to be equal are small integers and need no rounding, or are compared where this did not happen.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from model import float8_casts, float8_kernels
from model.float8_casts import FLOAT8

ENDS = torch.tensor([16, 32, 112, 144], dtype=torch.int32)
ROWS = 160  # 16 of them belong to no group
float8_kernels.TILE.update(ROWS=16, COLUMNS=32, SHARES=2)  # a group has several tiles, and a program more than one


def integers(rows: int, columns: int, *, by_row: bool) -> torch.Tensor:
    """-15 to 15 times a power of two that rows, or columns, have in common; a row, or column, of zeros."""
    exponent = torch.randint(-20, 20, (rows, 1) if by_row else (1, columns))
    found = torch.randint(-15, 16, (rows, columns)) * 2.0**exponent
    found[(3, slice(None)) if by_row else (slice(None), 3)] = 0.0
    return found.bfloat16()


def compare(name: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for i, (mine, plain) in enumerate(pairs):
        assert mine.dtype == plain.dtype and mine.shape == plain.shape, name
        x, y = mine.double(), plain.double()
        error = 0.0 if torch.equal(x, y) else float((x - y).norm() / y.norm())
        print(f"{name}:{i}\t{error:.3e}")


def empty(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, columns, dtype=FLOAT8), torch.empty(rows)


def rounded_alike(mine: torch.Tensor, plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is no power of two."""
    kept = plain.view(torch.uint8) & 7 > 0
    return mine[kept].float(), plain[kept].float()


for columns in (48, 96):  # the last block of columns is cut short
    token = torch.randint(0, 41, (ROWS,))  # 40: none
    for given, rows in ((None, ROWS), (token, 40)):
        label = f"{columns}{'' if given is None else ', gathered'}"
        x = integers(rows, columns, by_row=True)
        mine = float8_kernels.cast_rows(x, given, *empty(ROWS, columns))
        compare(f"rows {label}", *zip(mine, float8_casts.cast_rows(x, given), strict=True))
        x = integers(rows, columns, by_row=False)
        out = torch.empty(columns, ROWS, dtype=FLOAT8)
        mine = float8_kernels.cast_columns(x, ENDS, given, out, group_stride=0, column_stride=ROWS)
        plain = float8_casts.cast_columns(x, ENDS, given)
        within = slice(0, int(ENDS[-1]))
        compare(f"columns {label}", (mine[0][:, within], plain[0][:, within]), (mine[1], plain[1]))
    w = torch.stack([integers(32, columns, by_row=False) for _ in range(3)])
    ends = torch.arange(32, 97, 32, dtype=torch.int32)
    strides = {"group_stride": (columns - 1) * 32, "column_stride": 32}
    out = torch.empty(3, columns, 32, dtype=FLOAT8)
    mine = float8_kernels.cast_columns(w.flatten(0, 1), ends, None, out, **strides)
    compare(f"matrices {columns}", *zip(mine, float8_casts.cast_matrices(w), strict=True))

    h, grad = torch.randn(ROWS, 2 * columns), torch.randn(ROWS, columns)
    mine, plain = float8_kernels.cast_swiglu(h, *empty(ROWS, columns)), float8_casts.cast_swiglu(h)
    compare(f"swiglu {columns}", rounded_alike(mine[0], plain[0]), (mine[1], plain[1]))
    weights, slot = torch.rand(ROWS + 1, 1), torch.randperm(ROWS)
    results = torch.empty_like(h), torch.empty_like(grad), torch.zeros_like(weights), *empty(ROWS, 2 * columns)
    mine = float8_kernels.cast_swiglu_backward(h, grad, weights, slot, ENDS, *results)
    plain = float8_casts.cast_swiglu_backward(h, grad, weights, slot, ENDS)
    pairs = [(m[within], p[within]) for m, p in zip(mine, plain, strict=True)]
    compare(f"swiglu backward {columns}", *pairs[:2], (mine[2], plain[2]), rounded_alike(*pairs[3]), pairs[4])
