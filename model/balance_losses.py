"""Losses that ask a router for balance, and how their gradient joins the model's.

``f`` is the share of assignments an expert got, ``P`` the mean router probability of it. f is a count and carries no
gradient. Padding takes part in neither. ``reduce`` sums a tensor over the ranks that hold other tokens of the same
balance group (context parallelism); by default there are none.
"""

from collections.abc import Callable
from typing import Any

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]


def aux_loss(
    probabilities: torch.Tensor, requested: torch.Tensor, valid: torch.Tensor, top_k: int, reduce: Reduce | None = None
) -> torch.Tensor:
    """E sum_i f_i P_i over one balance group; 1 when uniform, up to E / k at collapse.

    Switch Transformer (arXiv 2101.03961, equations 4 to 6) with f over k choices, as in OLMoE (arXiv 2409.02060).
    Linear in neither tokens nor batches, so the group it is taken over is part of its definition: one micro-batch
    here.

    Args:
        probabilities: (T, E), rows sum to 1.
        requested: bool (T, E), k True a row.
        valid: bool (T,).

    Returns:
        Scalar; with ``reduce``, this rank's part of a sum.
    """
    counts = (requested & valid[:, None]).sum(0)
    return aux_loss_of(probabilities, counts if reduce is None else reduce(counts), valid, top_k, reduce)


def aux_loss_of(
    probabilities: torch.Tensor, counts: torch.Tensor, valid: torch.Tensor, top_k: int, reduce: Reduce | None = None
) -> torch.Tensor:
    """:func:`aux_loss` with f from ``counts`` (E,), which may cover more tokens than ``probabilities`` does.

    With counts of the global batch this is the global-batch balance loss of Qwen (arXiv 2501.11873): its mean over
    micro-batches of equally many tokens is E sum_i f_i P_i of the global batch, however it is split. No counts at all
    (before the first step) count as uniform.
    """
    experts, tokens = probabilities.shape[-1], valid.sum()
    if reduce is not None:
        tokens = reduce(tokens)
    total = counts.sum().to(probabilities.dtype)
    share = torch.where(total > 0, counts / total.clamp(min=1), 1.0 / experts)
    mean = (probabilities * valid[:, None]).sum(0) / tokens.clamp(min=1)
    return experts * (share.detach() * mean).sum()


def sequence_aux_loss(
    probabilities: torch.Tensor, requested: torch.Tensor, valid: torch.Tensor, top_k: int, reduce: Reduce | None = None
) -> torch.Tensor:
    """:func:`aux_loss` of each sequence by itself, averaged over sequences (DeepSeek-V3, arXiv 2412.19437, eq. 17 to
    20).

    Args:
        probabilities, requested: (B, S, E).
        valid: bool (B, S). A sequence without a valid token is padding and takes no part in the average.
    """
    experts = probabilities.shape[-1]
    counts, tokens = (requested & valid[..., None]).sum(1), valid.sum(1)
    if reduce is not None:
        counts, tokens = reduce(counts), reduce(tokens)
    share = counts / (tokens[:, None] * top_k).clamp(min=1)
    mean = (probabilities * valid[..., None]).sum(1) / tokens[:, None].clamp(min=1)
    return experts * (share.detach() * mean).sum() / (tokens > 0).sum().clamp(min=1)


def z_loss(logits: torch.Tensor, valid: torch.Tensor, reduce: Reduce | None = None) -> torch.Tensor:
    """Mean over valid tokens of (logsumexp of the logits)^2 (ST-MoE, arXiv 2202.08906, equation 5)."""
    tokens = valid.sum()
    if reduce is not None:
        tokens = reduce(tokens)
    return (torch.logsumexp(logits, dim=-1).square() * valid).sum() / tokens.clamp(min=1)


def router_entropy(probabilities: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Mean entropy of a token's router probabilities, in nats: log E when undecided, 0 when certain."""
    entropy = -torch.special.xlogy(probabilities, probabilities).sum(-1)
    return (entropy * valid).sum() / valid.sum().clamp(min=1)


class _InjectLoss(torch.autograd.Function):
    """Identity on ``x`` that gives ``loss`` a gradient of 1 in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, grad.new_ones((), dtype=ctx.dtype)


def inject_loss(x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``x``, unchanged; whenever a gradient flows back through it, ``loss`` (a float32 scalar) has been minimised as
    well.

    The training loss stays the cross entropy, and a pipeline stage that never sees it still balances its routers.
    ``loss`` must already carry its coefficient and its share of the global batch.
    """
    return _InjectLoss.apply(x, loss)
