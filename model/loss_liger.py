"""Losses of liger-kernel 0.8.5 (arXiv 2410.10989): its cross-entropy kernel, and that fused with the head's product.

Its functions are taken below its autograd classes, which multiply gradients in place in the backward pass, give the
loss in the dtype of the logits, and accumulate the matrix's gradient in bfloat16 unless they are told otherwise. Both
need the columns of the whole vocabulary, and a GPU (config/liger.py says who is refused).
"""

from typing import Any

import torch

from model.loss import IGNORE, Compiler, HeadLoss
from model.loss_chunked import Parts, with_gradient


class LigerCrossEntropy(HeadLoss):
    """All logits, which the kernel overwrites with their gradient: nothing as large beside them, nothing wider."""

    def compile(self, compiler: Compiler) -> None:
        """Nothing to compile."""

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wanted = torch.is_grad_enabled() and logits.requires_grad
        return _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.soft_cap, self.z_loss_coeff, wanted)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, soft_cap: float, z_loss_coeff: float, wanted: bool
    ) -> torch.Tensor:
        from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

        logits, labels = logits.detach().contiguous(), labels.contiguous()
        tokens, columns = logits.shape
        loss, z_loss = torch.zeros(2, tokens, dtype=torch.float32, device=logits.device)
        liger_cross_entropy_kernel[(tokens,)](
            X_ptr=logits,
            X_stride=logits.stride(0),
            Y_ptr=labels,
            Y_stride=1,
            weight_ptr=None,
            loss_ptr=loss,
            z_loss_ptr=z_loss,
            loss_stride=1,
            token_accuracy_ptr=None,
            token_accuracy_stride=0,
            predicted_tokens_ptr=None,
            predicted_tokens_stride=0,
            n_cols=columns,
            n_non_ignore=1,
            sum_non_ignore_weight=1,
            weight_sum=0.0,
            ignore_index=IGNORE,
            lse_square_scale=z_loss_coeff,
            label_smoothing=0.0,
            reduction="sum",
            softcap=soft_cap or None,
            RETURN_Z_LOSS=True,
            RETURN_TOKEN_ACCURACY=False,
            RETURN_PREDICTED_TOKENS=False,
            BLOCK_SIZE=min(MAX_FUSED_SIZE, 1 << (columns - 1).bit_length()),
            HAS_WEIGHT=False,
            HAS_SOFTCAPPING=bool(soft_cap),
            HAS_GRADIENTS=wanted,
            num_warps=32,
        )
        if wanted:
            ctx.save_for_backward(logits)  # by now their gradient
        return (loss - z_loss).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (by_logits,) = ctx.saved_tensors
        return by_logits.mul_(grad), None, None, None, None  # in place: it is what the kernel saves memory for


class LigerFusedLinear(HeadLoss):
    """Logits of some rows at a time, as many as make them no larger than the hidden states; gradients on the way
    forward, the head's matrix's in float32.
    """

    def compile(self, compiler: Compiler) -> None:
        """Nothing to compile."""

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As :meth:`HeadLoss.__call__`."""
        return with_gradient(self.forward_backward, hidden, weight, labels)

    def forward_backward(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, gradients: bool
    ) -> Parts:
        """The loss of (T, dim), and its gradients unless they are not wanted; waits for the device once."""
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

        each, z_losses, _, _, by_hidden, by_weight, _ = fused_linear_cross_entropy_forward(
            hidden,
            weight,
            labels,
            ignore_index=IGNORE,
            lse_square_scale=self.z_loss_coeff,
            reduction="none",  # a sum by token would be taken of z-losses in the dtype of the hidden states
            softcap=self.soft_cap or None,
            return_z_loss=self.z_loss_coeff > 0,
            accum_dtype=torch.float32,
            compute_gradients=gradients,
            weight_requires_grad=gradients,
        )
        loss = each.sum()
        if z_losses is not None:
            loss = loss - z_losses.float().sum()
        return loss, by_hidden if gradients else None, by_weight if gradients else None
