"""RMSNorm, rotary embedding and SwiGLU by liger-kernel 0.8.5 (arXiv 2410.10989), on CUDA.

Each is registered as an operator with its backward pass, so that compiled blocks, checkpointing and schedules that
come to a backward pass twice see a function without side effects. Liger's own autograd classes write over inputs that
autograd does not know they change.
"""

from typing import Any

import torch
from torch import nn

from model.attention import Attention
from model.compute_dtype import RMSNorm
from model.feed_forward import FeedForward

NAMESPACE = "ablation_trainer"


class LigerRMSNorm(RMSNorm):
    """RMSNorm, computed in float32 and rounded once as torch's kernel does (Liger's casting mode "gemma").

    ``compute`` is what tensor parallelism wraps: it is given whole rows and the whole weight.
    """

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps=eps)
        self.compute = rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., size) -> (..., size)."""
        return self.compute(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in the dtype of ``x``."""
    return torch.ops.ablation_trainer.liger_rms_norm(x, weight, eps)[0]


def rotate(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`model.rope.apply_rope` of both, (B, S, H, D): Liger turns the same pairs, i and i + D / 2."""
    return torch.ops.ablation_trainer.liger_rope(q, k, table, False)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``; keeps its two inputs, nothing else."""
    return torch.ops.ablation_trainer.liger_swiglu(gate, up)


def use_liger(model: nn.Module, *, rms_norm: bool = False, rope: bool = False, swiglu: bool = False) -> None:
    """Give the modules of ``model`` (on the meta device) Liger's kernels in place; names of parameters stay."""
    for parent in list(model.modules()):
        if rope and isinstance(parent, Attention):
            parent.rotate = rotate
        if swiglu and isinstance(parent, FeedForward):
            parent.gated = gated
        for name, child in list(parent.named_children()):
            if rms_norm and type(child) is RMSNorm:
                setattr(parent, name, LigerRMSNorm(child.normalized_shape[0], child.eps))


@torch.library.custom_op(f"{NAMESPACE}::liger_rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    y, _, scale, *_ = rms_norm_forward(x.contiguous(), weight.contiguous(), eps, 0.0, "gemma", None)
    return y, scale


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@torch.library.custom_op(f"{NAMESPACE}::liger_rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from liger_kernel.ops.rms_norm import _CASTING_MODE_GEMMA, calculate_settings, rms_norm_backward

    rows = x.contiguous().view(-1, x.shape[-1])
    return rms_norm_backward(
        dy.contiguous(),
        rows,
        weight.contiguous(),
        scale,
        0.0,
        _CASTING_MODE_GEMMA.value,
        *calculate_settings(x.shape[-1]),
        in_place=False,
        row_mode=None,
    )


@_rms_norm_backward.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Any:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _differentiate_norm(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    return *_rms_norm_backward(dy, *ctx.saved_tensors), None


_rms_norm.register_autograd(_differentiate_norm, setup_context=_keep_norm)


@torch.library.custom_op(f"{NAMESPACE}::liger_rope", mutates_args=())
def _rope(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, backward: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from liger_kernel.ops.rope import rope_backward, rope_forward

    # Liger turns in place what is contiguous as (B, S, H, D), and wants it as (B, H, S, D).
    q, k = (x.clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in (q, k))
    cos, sin = table.unbind(-2)  # (S, D/2) or (B, S, D/2)
    turn = rope_backward if backward else rope_forward
    found = turn(q, k, cos, sin, rotary_dim=q.shape[-1])
    return found[0].transpose(1, 2), found[1].transpose(1, 2)


@_rope.register_fake
def _(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, backward: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _keep_rope(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[2])


def _differentiate_rope(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_rope(dq, dk, *ctx.saved_tensors, True), None, None


_rope.register_autograd(_differentiate_rope, setup_context=_keep_rope)


@torch.library.custom_op(f"{NAMESPACE}::liger_swiglu", mutates_args=())
def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from liger_kernel.ops.swiglu import swiglu_forward

    return swiglu_forward(gate.contiguous(), up.contiguous())[2]


@_swiglu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op(f"{NAMESPACE}::liger_swiglu_backward", mutates_args=())
def _swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from liger_kernel.ops.swiglu import swiglu_backward

    copies = (x.clone(memory_format=torch.contiguous_format) for x in (gate, up))  # become the gradients
    by_gate, by_up = swiglu_backward(*copies, grad.contiguous())
    return by_gate.view(gate.shape), by_up.view(up.shape)


@_swiglu_backward.register_fake
def _(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _keep_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _swiglu_backward(grad, *ctx.saved_tensors)


_swiglu.register_autograd(_differentiate_swiglu, setup_context=_keep_swiglu)
