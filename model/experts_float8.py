"""Experts whose products take float8 operands (model/float8_casts.py), one autograd function as in
model/experts_grouped.py, with the same saved for backward.

Of the six products of a layer the two forward and the two that lead to the input take one scale a row of their left
operand and one a column of an expert's matrix. The two gradients of matrices sum over an expert's rows: there a scale
is that of a column within the expert, and both operands are cast anew, transposed. A recipe may leave those two in the
compute dtype instead.

Each expert's rows are padded to a multiple of 16, in the index that gathers them: no copy pads anything. A padded row
has weight 0, so it adds nothing to any gradient, and no token collects it.

torchao 0.18 has a grouped product of this kind, `_to_fp8_rowwise_then_scaled_grouped_mm`, whose scales these are. It is
a product a call, so gathered rows, activations and outputs would all be kept for backward; it wants each matrix in
memory along the sum of the forward product, of which w13 would need a copy, and its gradient another; it pads nothing
yet (an assertion), runs on a GPU alone, and times the variants of its cast anew for each number of rows.
"""

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from config.precision import in_float8_experts
from config.schema import Config
from model.experts import Experts
from model.float8_casts import Cast, cast_columns, cast_matrices, cast_rows, cast_swiglu, cast_swiglu_backward
from model.grouped_products import grouped_mm, scaled_grouped_mm
from model.permute import Plan, pad_plan, plan_rows
from model.row_ops import combine, gather_rows, gather_sum

logger = logging.getLogger(__name__)

MULTIPLE = 16
"""Rows of an expert: 16 bytes of float8, what a kernel's loads are aligned to where the sum runs over rows."""


class _Float8Experts(torch.autograd.Function):
    """See the module's docstring. R rows sorted by expert and padded; ``ends`` (E,) are where the experts' rows end."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weights: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        token: torch.Tensor,
        slot: torch.Tensor,
        row: torch.Tensor,
        ends: torch.Tensor,
        matrices_in_float8: bool,
        emulate: bool,
    ) -> torch.Tensor:
        def product(a: Cast, b: Cast) -> torch.Tensor:
            return scaled_grouped_mm(*a, *_turned(b), ends, dtype=x.dtype, emulate=emulate)

        h = product(cast_rows(x, token), cast_matrices(w13))  # (R, 2 hidden)
        y = product(cast_swiglu(h), _cast_matrix_rows(w2))  # (R, dim)
        ctx.save_for_backward(x, weights, w13, w2, token, slot, row, ends, h)
        ctx.matrices_in_float8, ctx.emulate = matrices_in_float8, emulate
        return combine(y, weights, row)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, w13, w2, token, slot, row, ends, h = ctx.saved_tensors

        def product(a: Cast, b: Cast, fast: bool = True) -> torch.Tensor:
            return scaled_grouped_mm(*a, *_turned(b), ends, dtype=x.dtype, emulate=ctx.emulate, fast=fast)

        def of_matrix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            """Gradient of a matrix: a^T b in each expert, of tokens' rows with rows."""
            if ctx.matrices_in_float8:
                # The one sum without a bound, the rows of an expert: not in 14 bits.
                return product(cast_columns(a, ends, token), cast_columns(b, ends, None), fast=False)
            return grouped_mm(gather_rows(a, token.clamp(max=a.shape[0] - 1), row).t(), b, ends)

        by_active = product(cast_rows(grad, token), cast_matrices(w2))  # (R, hidden), W2^T g
        padded = F.pad(weights.flatten(), (0, 1))[:, None]  # a weight 0 for the slot of padding
        d_h, active, d_padded, *d_h8 = cast_swiglu_backward(h, by_active, padded, slot, ends)
        del by_active
        d_w2 = of_matrix(grad, active)  # (E, dim, hidden)
        del active
        d_w13 = of_matrix(x, d_h)  # (E, dim, 2 hidden)
        del d_h
        d_x = gather_sum(product((d_h8[0], d_h8[1]), _cast_matrix_rows(w13)), token, row)
        return d_x, d_padded[:-1].view_as(weights), d_w13, d_w2, *[None] * 6


def _turned(found: Cast) -> Cast:
    """The right operand of a product, whose columns lie in memory as rows."""
    return found[0].transpose(-2, -1), found[1]


def _cast_matrix_rows(w: torch.Tensor) -> Cast:
    """One scale a row of each matrix: (E, N, K) -> float8 (E, N, K), inverse scales (E, N)."""
    numbers, inverse = cast_rows(w.flatten(0, 1), None)
    return numbers.view_as(w), inverse.view(w.shape[:2])


def float8_experts(
    x: torch.Tensor,
    experts: torch.Tensor | Plan,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    max_rows: int | None = None,
    *,
    matrices_in_float8: bool = True,
    emulate: bool = False,
) -> torch.Tensor:
    """:func:`model.experts.loop_experts` with float8 operands.

    Args:
        matrices_in_float8: also in the products that give the gradients of ``w13`` and ``w2``.
        emulate: see :func:`model.grouped_products.scaled_grouped_mm`. Without it, bfloat16 on Hopper.
    """
    plan = pad_plan(plan_rows(experts, w13.shape[0], max_rows), MULTIPLE)
    return _Float8Experts.apply(
        x, weights, w13, w2, plan.token, plan.slot, plan.row, plan.ends, matrices_in_float8, emulate
    )


def use_float8_experts(model: nn.Module, config: Config) -> None:
    """Give the experts that ``config`` names float8 products, in place. Parameters stay as they are.

    Args:
        model: nothing wraps :attr:`model.experts.Experts.compute` yet; parameters may be on the meta device.
    """
    section = config.quantize.grouped_mm.float8
    compute = functools.partial(
        float8_experts, matrices_in_float8=section.recipe_name == "rowwise", emulate=section.emulate
    )
    found = [
        module
        for path, module in model.named_modules()
        if isinstance(module, Experts) and in_float8_experts(config, path)
    ]
    for experts in found:
        experts.compute = compute
    if found:
        logger.info(
            "Applied float8 (%s) to the experts of %d layers%s",
            section.recipe_name,
            len(found),
            ", emulated" if section.emulate else "",
        )
