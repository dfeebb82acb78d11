"""Training losses. A loss is a *sum* over valid tokens: the trainer divides by the global batch's count."""

import torch
import torch.nn.functional as F

IGNORE = -100
"""Label that takes no part in the loss."""


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross entropy in nats, in float32 (float64 for float64 logits).

    Args:
        logits: (B, S, vocab_size).
        labels: int64 (B, S); ``IGNORE`` leaves a position out.

    Returns:
        Scalar.
    """
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
