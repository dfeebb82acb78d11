"""The experts of a layer: stacked SwiGLU weights, and three ways to run them with the same result.

Layout. ``w13`` is [E, dim, 2 * hidden] with gate and up columns interleaved (even: gate, odd: up); ``w2`` is [E, dim,
hidden]. Both weight gradients are then products of a token-side operand, transposed by its strides alone, with a
hidden-side one (x^T dh and g^T a), and come out in the layout of the weight: nothing is transposed in memory (that
copy cost 27 ms of a 430 ms step, the size of all gradients of w13). Interleaving is what fused SwiGLU kernels read,
and makes any even slice of columns a narrower SwiGLU, which tensor parallelism can cut.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from config.schema import Moe
from model.compute_dtype import compute_dtype
from model.experts_grouped import grouped_experts
from model.experts_quack import quack_experts
from model.permute import Plan, ids_of, plan_pieces

Compute = Callable[..., torch.Tensor]
"""(x, experts, weights, w13, w2, max_rows) -> (T, dim), as :func:`loop_experts`."""

Serve = Callable[..., tuple[torch.Tensor, ...]]
"""(x, compute, plan, w13, w2) -> results: what a dispatcher has experts do, see :meth:`Experts.forward`."""


def loop_experts(
    x: torch.Tensor,
    experts: torch.Tensor | Plan,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    max_rows: int | None = None,
) -> torch.Tensor:
    """sum_s weights[t, s] * expert_{experts[t, s]}(x[t]), an expert at a time: the readable reference.

    The host waits for the device at every expert, to learn how many tokens it has.

    Args:
        x: (T, dim).
        experts: int64 (T, slots), an id of E or more means nowhere; or the plan, where it is known.
        weights: float32 (T, slots).
        w13: (E, dim, 2 * hidden), gate and up columns interleaved.
        w2: (E, dim, hidden).
        max_rows: not needed here.

    Returns:
        (T, dim) in the dtype of ``x``; sums over experts in float32.
    """
    if isinstance(experts, Plan):
        experts = ids_of(experts)
    # float32, or float64 for float64 inputs: a sum of k experts is not rounded k times.
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in range(len(w13)):
        token, slot = torch.where(experts == expert)
        hidden = x[token] @ w13[expert]
        active = F.silu(hidden[:, 0::2]) * hidden[:, 1::2]
        out = (active @ w2[expert].T).to(total.dtype) * weights[token, slot, None]
        total = total.index_add(0, token, out.to(total.dtype))
    return total.to(x.dtype)


KERNELS: dict[str, Compute] = {"loop": loop_experts, "grouped_mm": grouped_experts, "quack": quack_experts}


class Experts(nn.Module):
    """E SwiGLU networks as two stacked parameters.

    Args:
        num_experts: how many this instance holds.
        dim: width of a token.
        hidden_dim: width of an expert.
        moe: ``moe.experts`` names the kernels.
    """

    def __init__(self, num_experts: int, dim: int, hidden_dim: int, moe: Moe):
        super().__init__()
        self.compute = KERNELS[moe.experts]
        self.w13 = nn.Parameter(torch.empty(num_experts, dim, 2 * hidden_dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))

    def forward(
        self,
        x: torch.Tensor,
        experts: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        max_rows: int | None = None,
        serve: Serve | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Weighted sum of each token's experts, (T, dim) -> (T, dim), or what ``serve`` makes of the experts.

        Args:
            x: (T, dim). With ``serve`` only its dtype and its place in autograd are of interest here: gradients of the
                experts are complete once its own is computed.
            experts: int64 (T, slots) in 0 .. num_experts - 1; ``num_experts`` means nowhere.
            weights: float32 (T, slots).
            max_rows: at most so many assignments go somewhere. None: all of them may.
            serve: in place of these three where tokens come and go by themselves, maybe in parts: it is given ``x``,
                the kernel, :func:`model.permute.plan_pieces` and the matrices, so that these are gathered, used and let
                go in one call of this module.
        """
        dtype = compute_dtype(x)  # autograd functions see no autocast
        w13, w2 = self.w13.to(dtype), self.w2.to(dtype)
        if serve is not None:
            return serve(x, self.compute, plan_pieces, w13, w2)
        return self.compute(x.to(dtype), experts, weights, w13, w2, max_rows)
