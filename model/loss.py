"""Losses of a head: cross entropy of ``hidden @ weight.T``, however much of that product is ever in memory.

A loss is a *sum* over valid tokens: the trainer divides by the global batch's count. It is given hidden states and the
head's matrix, not logits, so that it may choose never to hold all of them (model/loss_chunked.py, loss_liger.py).

Its value is the cross entropy in nats; its gradient is that of cross entropy plus z-loss (PaLM, arXiv 2204.02311,
section 5): what is logged, compared and validated means the same with and without one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

IGNORE = -100
"""Label that takes no part in the loss."""

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gives a faster function that does the same."""


class Vocabulary:
    """Which columns of the logits are here: all of them. ``parallelisms/`` gives a loss another one where ranks share
    the vocabulary; nothing else of a loss knows of ranks.
    """

    parts = 1
    """Among how many ranks the columns are split."""

    def first(self, columns: int) -> int:
        """Id of the first of the ``columns`` that are here."""
        return 0

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the ranks that hold other columns."""
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the ranks that hold other columns."""
        return x

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """What the logits of the columns here become before a loss sees them."""
        return logits


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over tokens and over the vocabulary are kept in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def soft_capped(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """``soft_cap * tanh(logits / soft_cap)`` (Gemma 2, arXiv 2408.00118); the logits themselves for 0."""
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap else logits


def cross_entropy_sum(
    logits: torch.Tensor, labels: torch.Tensor, soft_cap: float = 0.0, z_loss_coeff: float = 0.0
) -> torch.Tensor:
    """Summed cross entropy in nats, in float32 (float64 for float64 logits), by torch's operators.

    Args:
        logits: (B, S, vocab_size).
        labels: int64 (B, S); ``IGNORE`` leaves a position out.
        soft_cap: see :func:`soft_capped`.
        z_loss_coeff: of the squared log of the softmax's denominator, which is added to the gradient alone.

    Returns:
        Scalar.
    """
    x, flat = logits.flatten(0, 1), labels.flatten()
    x = soft_capped(x.to(wide(x.dtype)), soft_cap)
    loss = F.cross_entropy(x, flat, ignore_index=IGNORE, reduction="sum")
    if z_loss_coeff:
        z = z_loss_coeff * torch.where(flat == IGNORE, 0, x.logsumexp(-1).square()).sum()
        loss = loss + (z - z.detach())
    return loss


class HeadLoss:
    """A summed loss of hidden states. This one computes all logits and lets torch's cross entropy have them.

    In bfloat16 it holds them once in bfloat16 and three times in float32: docs/memory.md has every loss's peak.

    Args:
        soft_cap: see :func:`soft_capped`. 0: none.
        z_loss_coeff: see :func:`cross_entropy_sum`. 0: none.
    """

    def __init__(self, soft_cap: float = 0.0, z_loss_coeff: float = 0.0):
        self.soft_cap, self.z_loss_coeff = soft_cap, z_loss_coeff
        self.vocabulary = Vocabulary()
        self.of_logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self.cross_entropy

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(..., dim) and (vocab_size, dim) -> (..., vocab_size) as the model means them, for those who sample."""
        return soft_capped(self.vocabulary.gathered(F.linear(hidden, weight)), self.soft_cap)

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Summed cross entropy in nats, float32 (float64 for float64).

        Args:
            hidden: (B, S, dim).
            weight: (columns of the vocabulary that are here, dim).
            labels: int64 (B, S); ``IGNORE`` leaves a position out.

        Returns:
            Scalar, the same on all ranks that share a vocabulary; its gradient is each one's share.
        """
        return self.of_logits(self.vocabulary.gathered(F.linear(hidden, weight)), labels)

    def compile(self, compiler: Compiler) -> None:
        """Compile what is not a matrix product."""
        self.of_logits = compiler(self.cross_entropy)

    def cross_entropy(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(B, S, columns here) -> scalar."""
        if self.vocabulary.parts == 1:
            return cross_entropy_sum(logits, labels, self.soft_cap, self.z_loss_coeff)
        return _OfShare.apply(logits.flatten(0, 1), labels.flatten(), self.vocabulary, self.soft_cap, self.z_loss_coeff)


class _OfShare(torch.autograd.Function):
    """Cross entropy over a vocabulary that ranks share: they send three numbers a token forward, none backward.

    (Megatron-LM's vocabulary-parallel cross entropy, arXiv 1909.08053, section 3.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocabulary: Vocabulary,
        soft_cap: float,
        z_loss_coeff: float,
    ) -> torch.Tensor:
        here = labels - vocabulary.first(logits.shape[-1])
        loss, log_sum = combined(vocabulary, *partial_softmax(logits, here, soft_cap))
        valid = labels != IGNORE
        ctx.save_for_backward(logits, here, log_sum, valid)
        ctx.options = soft_cap, z_loss_coeff
        return torch.where(valid, loss, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, here, log_sum, valid = ctx.saved_tensors
        return logits_gradient(logits, here, log_sum, valid * grad, *ctx.options), None, None, None, None


def partial_softmax(
    logits: torch.Tensor, labels: torch.Tensor, soft_cap: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What cross entropy needs of some columns of the logits. No gradient flows.

    Args:
        logits: (T, C); left as they are.
        labels: int64 (T,), counted from the first of these columns; outside of 0 .. C - 1 it is no column of these.

    Returns:
        The largest logit, the sum of exp(logit - largest) and the label's logit, 0 where it is elsewhere: (T,) each,
        float32 (float64 for float64). One wide copy of the logits is made on the way.
    """
    x = _wide_copy(logits, soft_cap)
    largest = x.amax(-1)
    mine, column = _places(labels, x.shape[-1])
    target = torch.where(mine, x.gather(-1, column[:, None])[:, 0], 0)
    return largest, x.sub_(largest[:, None]).exp_().sum(-1), target


def combined(
    vocabulary: Vocabulary, largest: torch.Tensor, exponentials: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's cross entropy and log of the softmax's denominator, of what :func:`partial_softmax` found here."""
    if vocabulary.parts > 1:
        here, largest = largest, vocabulary.largest(largest.clone())
        exponentials, target = vocabulary.total(torch.stack([exponentials * (here - largest).exp(), target]))
    log_sum = exponentials.log()
    return log_sum - (target - largest), log_sum + largest


def logits_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    log_sum: torch.Tensor,
    scale: torch.Tensor,
    soft_cap: float,
    z_loss_coeff: float,
) -> torch.Tensor:
    """Gradient of cross entropy and z-loss by some columns of the logits.

    Args:
        logits, labels: as for :func:`partial_softmax`.
        log_sum: (T,), log of the softmax's denominator over the whole vocabulary.
        scale: (T,), of each token's gradient; 0 leaves it out.

    Returns:
        (T, C) in the dtype of ``logits``, rounded once. A wide copy is made on the way, two with a soft cap.
    """
    x = _wide_copy(logits, soft_cap)
    slope = (x / soft_cap).square_().neg_().add_(1) if soft_cap else None
    share = scale * (1 + 2 * z_loss_coeff * log_sum) if z_loss_coeff else scale
    x.sub_(log_sum[:, None]).exp_().mul_(share[:, None])
    mine, column = _places(labels, x.shape[-1])
    hot = torch.where(mine, scale, 0)
    if torch.compiler.is_compiling():  # fuses, where a scatter would write the wide copy to memory
        x = x - torch.where(torch.arange(x.shape[-1], device=x.device) == column[:, None], hot[:, None], 0)
    else:
        x.scatter_add_(-1, column[:, None], -hot[:, None].to(x.dtype))
    return (x if slope is None else x.mul_(slope)).to(logits.dtype)


def _wide_copy(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    x = logits.to(wide(logits.dtype), copy=True)
    return x.div_(soft_cap).tanh_().mul_(soft_cap) if soft_cap else x


def _places(labels: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine = (labels >= 0) & (labels < columns)
    return mine, torch.where(mine, labels, 0)
