"""Experts on quack's CuTe DSL kernels (Hopper and newer): gather, product and SwiGLU in one kernel, forward and
backward.

Saved for backward: x (T, dim), the pre-activation h (R, 2 hidden), routing weights and integer indices, as in
model/experts_grouped.py. The backward kernel gathers g, multiplies, applies the SwiGLU derivative, scales by the
routing weight and reduces the router's gradient at once; the weight gradients gather x and g themselves, so no
gathered copy is ever written.
"""

from typing import Any

import torch
import torch.nn.functional as F

from config.errors import ConfigError
from model.permute import Plan, plan_rows
from model.row_ops import combine, gather_sum, zero_empty_
from model.row_reference import gather_sum as sum_numbers


def _kernels() -> Any:
    try:
        import quack.gemm_interface as kernels
    except ImportError as error:
        raise ConfigError(
            f'moe.experts = "quack": the kernels cannot be imported ({error}). Install them with'
            ' pip install -e ".[kernels]" on a CUDA host, or set moe.experts = "grouped_mm".'
        ) from error
    return kernels


class _QuackExperts(torch.autograd.Function):
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
        bounds: torch.Tensor,
    ) -> torch.Tensor:
        kernels = _kernels()
        h, active = kernels.gemm_act(x, w13, activation="swiglu", cu_seqlens_m=bounds, A_idx=token, tuned=False)
        y = kernels.gemm(active, w2.transpose(-2, -1), cu_seqlens_m=bounds, tuned=False)  # (R, dim)
        ctx.save_for_backward(x, weights, w13, w2, token, slot, row, bounds, h)
        return combine(y, weights, row)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights, w13, w2, token, slot, row, bounds, h = ctx.saved_tensors
        kernels, grad = _kernels(), grad.contiguous()
        d_h, active, d_weight = kernels.gemm_dact(
            grad,
            w2,
            h,
            activation="swiglu",
            colvec_scale=weights.flatten()[slot],
            colvec_reduce=True,
            cu_seqlens_m=bounds,
            A_idx=token,
            tuned=False,
        )  # active is scaled by the routing weight, d_weight is not
        d_w2 = kernels.gemm(grad.t(), active, cu_seqlens_k=bounds, A_idx=token, tuned=False)
        d_w13 = kernels.gemm(x.t(), d_h, cu_seqlens_k=bounds, A_idx=token, tuned=False)
        zero_empty_(d_w2, bounds[1:])
        zero_empty_(d_w13, bounds[1:])
        d_x = gather_sum(kernels.gemm(d_h, w13.transpose(-2, -1), cu_seqlens_m=bounds, tuned=False), token, row)
        d_weights = sum_numbers(d_weight.float().view(-1, 1), row.flatten()[:, None]).view_as(weights)
        return d_x, d_weights, d_w13, d_w2, None, None, None, None


def quack_experts(
    x: torch.Tensor,
    experts: torch.Tensor | Plan,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    max_rows: int | None = None,
) -> torch.Tensor:
    """:func:`model.experts.loop_experts` on quack kernels, bfloat16 on CUDA only.

    Raises:
        ConfigError: quack is not installed, or the tensors are not bfloat16 on CUDA.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16:
        raise ConfigError(
            f'moe.experts = "quack" runs in bfloat16 on CUDA; this is {x.dtype} on {x.device.type}.'
            ' Set moe.experts = "grouped_mm".'
        )
    plan = plan_rows(experts, w13.shape[0], max_rows)
    bounds = F.pad(plan.ends, (1, 0))
    return _QuackExperts.apply(x, weights, w13, w2, plan.token.int(), plan.slot, plan.row, bounds)
