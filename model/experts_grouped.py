"""Experts as grouped matrix products (model/grouped_products.py), one autograd function for the whole expert network.

Saved for backward: x (T, dim), the pre-activation h (R, 2 hidden), routing weights and integer indices; the experts'
matrices, in the compute dtype, by reference. Not saved, though a chain of autograd operations would: the gathered rows
(R, dim), the activation (R, hidden) and the experts' outputs (R, dim). Where a row of x has one place, x is kept as
gathered; a compiler keeps the gathered rows in any case, as it merges the gathers of both passes. The router's gradient
needs <g, y_r> with y_r = W2 a_r; it is <W2^T g, a_r>, whose left side the backward pass computes anyway.

In bfloat16 nothing waits for the device: row counts stay in a tensor, and R is known to the host.
"""

from typing import Any

import torch

from model.grouped_products import grouped_mm
from model.permute import Plan, plan_rows
from model.row_ops import combine, gather_rows, gather_sum, swiglu, swiglu_backward, weight_gradient


class _GroupedExperts(torch.autograd.Function):
    """See the module's docstring. R rows sorted by expert; ``ends`` (E,) are the ends of the experts' rows."""

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
    ) -> torch.Tensor:
        rows = gather_rows(x, token, row)  # (R, dim)
        h = grouped_mm(rows, w13, ends)  # (R, 2 hidden)
        y = grouped_mm(swiglu(h), w2.transpose(-2, -1), ends)  # (R, dim)
        ctx.sorted = weights.shape[1] == 1  # then x in another order is no more to keep
        ctx.save_for_backward(rows if ctx.sorted else x, weights, w13, w2, token, slot, row, ends, h)
        return combine(y, weights, row)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, w13, w2, token, slot, row, ends, h = ctx.saved_tensors
        g = gather_rows(grad, token, row)  # (R, dim)
        d_h, active, d_weights = swiglu_backward(h, grouped_mm(g, w2, ends), weights, slot, ends)
        d_w2 = weight_gradient(g, active, ends)  # (E, dim, hidden)
        del g, active
        d_w13 = weight_gradient(x if ctx.sorted else gather_rows(x, token, row), d_h, ends)  # (E, dim, 2 hidden)
        d_x = gather_sum(grouped_mm(d_h, w13.transpose(-2, -1), ends), token, row)
        return d_x, d_weights, d_w13, d_w2, None, None, None, None


def grouped_experts(
    x: torch.Tensor,
    experts: torch.Tensor | Plan,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    max_rows: int | None = None,
) -> torch.Tensor:
    """:func:`model.experts.loop_experts` as grouped products. On CUDA grouped_mm is fast in bfloat16."""
    plan = plan_rows(experts, w13.shape[0], max_rows)
    return _GroupedExperts.apply(x, weights, w13, w2, plan.token, plan.slot, plan.row, plan.ends)
