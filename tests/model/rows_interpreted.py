"""Every kernel of model/row_kernels.py against model/row_reference.py, on a CPU: run as a program, Triton interprets
them.

Prints a line "name<tab>error" for each tensor that is compared, on inputs drawn anew each time: 0 where they are equal
to the bit.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from model import row_kernels, row_reference
from model.permute import plan_rows

EXPERTS, TOKENS = 6, 8


def example(slots: int, dtype: torch.dtype, width: int, bound: bool):
    """Assignments of which some go nowhere, ties of weights, an expert without rows; the rows hold NaN where no
    assignment names them.
    """
    experts = torch.rand(TOKENS, EXPERTS).topk(min(slots, EXPERTS)).indices
    experts = experts.repeat(1, 4)[:, :slots]  # more slots than experts: the same one twice
    experts[(experts == 2) | (torch.rand(experts.shape) < 0.2)] = EXPERTS
    experts[3] = EXPERTS  # a token without experts
    weights = torch.randint(1, 5, experts.shape) / 3 * (experts < EXPERTS)
    plan = plan_rows(experts, EXPERTS, int((experts < EXPERTS).sum()) if bound else None)
    rows = torch.randn(len(plan.token), width).to(dtype)
    rows[int(plan.ends[-1]) :] = torch.nan
    return plan, weights, rows


def compare(name: str, *pairs: tuple[torch.Tensor, torch.Tensor]) -> None:
    for i, (mine, plain) in enumerate(pairs):
        assert mine.dtype == plain.dtype and mine.shape == plain.shape, name
        x, y = mine.double(), plain.double()
        error = 0.0 if torch.equal(x, y) else float((x - y).norm() / y.norm())
        print(f"{name}:{i}\t{error:.3e}")


def check(slots: int, dtype: torch.dtype, width: int, bound: bool) -> None:
    plan, weights, rows = example(slots, dtype, width, bound)
    name = f"{slots} slots {str(dtype)[6:]} width {width} {'bound' if bound else 'whole'}"
    used = int(plan.ends[-1])
    x = torch.randn(TOKENS, width).to(dtype)
    compare(f"gather {name}", (row_kernels.gather_rows(x, plan.token), x[plan.token]))
    sums = [(weights, "weighted"), (None, "plain")]
    for w, kind in sums:
        functions = (row_kernels.gather_sum, row_reference.gather_sum)
        compare(f"gather_sum {kind} {name}", tuple(f(rows, plan.row, w) for f in functions))
    h, d = torch.randn(len(rows), 2 * width).to(dtype), torch.randn(len(rows), width).to(dtype)
    h[used:], d[used:] = torch.nan, torch.nan
    compare(f"swiglu {name}", (row_kernels.swiglu(h[:used]), row_reference.swiglu(h[:used])))
    arguments = (h, d, weights, plan.slot, plan.ends)
    found = [f(*arguments) for f in (row_kernels.swiglu_backward, row_reference.swiglu_backward)]
    compare(f"swiglu_backward {name}", *((a[:used], b[:used]) for a, b in [*zip(*found, strict=True)][:2]))
    compare(f"swiglu_backward weights {name}", (found[0][2], found[1][2]))
    gradient = torch.randn(EXPERTS, width, 40).to(dtype)
    both = [f(gradient.clone(), plan.ends) for f in (row_kernels.zero_empty_, row_reference.zero_empty_)]
    compare(f"zero_empty {name}", tuple(both))


def main() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    row_kernels.ZEROS = 2  # the interpreter runs programs one after another
    for slots, dtype, width, bound in (
        (1, torch.float32, 24, True),
        (2, torch.bfloat16, 1032, False),  # SwiGLU takes such a row in two parts
        (3, torch.float32, 40, False),
        (8, torch.bfloat16, 16, True),
        (16, torch.float32, 8, True),
        (20, torch.float32, 8, False),  # as many as an expert's choice of tokens has
    ):
        check(slots, dtype, width, bound)
    row_kernels.COLUMNS = 16  # rows in parts, the last one not full
    check(4, torch.bfloat16, 40, True)
    empty = torch.zeros(0, 8)
    nobody = torch.full((5, 2), 0)
    assert (
        not row_kernels.gather_sum(empty, nobody).any() and row_kernels.gather_rows(empty, nobody[:0, 0]).numel() == 0
    )
    assert row_kernels.swiglu(empty).shape == (0, 4)


if __name__ == "__main__":
    main()
