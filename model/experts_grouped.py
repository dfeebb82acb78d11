"""Experts as grouped matrix products (model/grouped_products.py), one autograd function for the whole expert network.

Saved for backward: x (T, dim), the pre-activation h (R, 2 hidden), routing weights and integer indices; the experts'
matrices, in the compute dtype, by reference. Not saved, though a chain of autograd operations would: the gathered rows
(R, dim), the activation (R, hidden) and the experts' outputs (R, dim). The router's gradient needs <g, y_r> with
y_r = W2 a_r; it is <W2^T g, a_r>, whose left side the backward pass computes anyway.

In bfloat16 nothing waits for the device: row counts stay in a tensor, and R is known to the host.
"""

from typing import Any

import torch

from model.fusion import fused
from model.grouped_products import grouped_mm
from model.permute import gather_sum, plan_rows


@fused
def swiglu(h: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in float32: (R, 2 hidden), interleaved, -> (R, hidden) in the dtype of ``h``."""
    gate, up = h.unflatten(-1, (-1, 2)).unbind(-1)
    wide = torch.promote_types(h.dtype, torch.float32)
    gate, up = gate.to(wide), up.to(wide)
    return (gate * gate.sigmoid() * up).to(h.dtype)


@fused
def swiglu_backward(
    h: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of ``weight * swiglu(h)`` at the row gradient W2^T g, and what the other gradients need.

    Args:
        h: (R, 2 hidden), interleaved.
        grad: (R, hidden), W2^T g of the row's token, without the routing weight.
        weight: float32 (R,).

    Returns:
        gradient of h (R, 2 hidden), weight * swiglu(h) (R, hidden), gradient of weight float32 (R,).
    """
    gate, up = h.unflatten(-1, (-1, 2)).unbind(-1)
    wide = torch.promote_types(h.dtype, torch.float32)
    gate, up, grad = gate.to(wide), up.to(wide), grad.to(wide)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    active, weight = silu * up, weight[:, None].to(wide)
    d_up = weight * grad * silu
    d_gate = weight * grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_h = torch.stack([d_gate, d_up], dim=-1).flatten(-2).to(h.dtype)
    return d_h, (weight * active).to(h.dtype), (grad * active).sum(-1)


fused_gather_sum = fused(gather_sum)


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
        h = grouped_mm(x[token], w13, ends)  # (R, 2 hidden)
        y = grouped_mm(swiglu(h), w2.transpose(-2, -1), ends)  # (R, dim)
        ctx.save_for_backward(x, weights, w13, w2, token, slot, row, ends, h)
        return fused_gather_sum(y, row, weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, w13, w2, token, slot, row, ends, h = ctx.saved_tensors
        g = grad[token]  # (R, dim)
        weight = weights.flatten()[slot]
        d_h, active, d_weight = swiglu_backward(h, grouped_mm(g, w2, ends), weight)
        d_w2 = _zero_empty(grouped_mm(g.t(), active, ends), ends)  # (E, dim, hidden)
        del g, active
        d_w13 = _zero_empty(grouped_mm(x[token].t(), d_h, ends), ends)  # (E, dim, 2 hidden)
        d_x = fused_gather_sum(grouped_mm(d_h, w13.transpose(-2, -1), ends), row)
        d_weights = gather_sum(d_weight[:, None], row.flatten()[:, None]).view_as(weights)
        return d_x, d_weights.to(weights.dtype), d_w13, d_w2, None, None, None, None


def _zero_empty(gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the weight gradient of experts without rows: grouped kernels may leave it unwritten (pytorch
    #174314).
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return gradient.masked_fill_((counts == 0)[:, None, None], 0.0)


def grouped_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    max_rows: int | None = None,
) -> torch.Tensor:
    """:func:`model.experts.loop_experts` as grouped products. On CUDA grouped_mm is fast in bfloat16."""
    plan = plan_rows(experts, w13.shape[0], max_rows)
    return _GroupedExperts.apply(x, weights, w13, w2, plan.token, plan.slot, plan.row, plan.ends)
