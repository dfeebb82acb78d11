"""Cross entropy over a vocabulary that is split over ranks: the logits are never gathered.

Forward sends three numbers a token, the largest logit, the sum of exponentials and the target's logit; backward sends
none. (Megatron-LM's vocabulary-parallel cross entropy, arXiv 1909.08053, section 3.)
"""

from typing import Any

import torch
import torch.distributed as dist

IGNORE = -100
"""Label that takes no part in the loss, as in model/loss.py."""


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = _wide(logits)
        largest = x.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        first = group.rank() * x.shape[-1]
        mine = (labels >= first) & (labels < first + x.shape[-1])
        column = torch.where(mine, labels - first, 0)
        target = torch.where(mine, x.gather(-1, column[:, None])[:, 0] - largest, 0)
        sums = torch.stack([(x - largest[:, None]).exp().sum(-1), target])
        dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        valid = labels != IGNORE
        ctx.save_for_backward(logits, log_sum + largest, column, mine, valid)
        return torch.where(valid, log_sum - sums[1], 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, log_sum, column, mine, valid = ctx.saved_tensors
        found = (_wide(logits) - log_sum[:, None]).exp()
        found.scatter_add_(-1, column[:, None], -mine[:, None].to(found.dtype))
        return (found * (valid * grad)[:, None]).to(logits.dtype), None, None


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def vocabulary_parallel_cross_entropy_sum(
    logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Summed cross entropy in nats, in float32 (float64 for float64 logits); the same on every rank of ``group``.

    Args:
        logits: (B, S, vocab_size / n), the columns of this rank; rank r of n holds the r-th n-th of the vocabulary.
        labels: int64 (B, S), the same on all ranks; -100 leaves a position out.
        group: the n ranks.

    Returns:
        Scalar. Its gradient is this rank's columns of the whole gradient.
    """
    return _CrossEntropySum.apply(logits.flatten(0, 1), labels.flatten(), group)
