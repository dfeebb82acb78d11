"""The output head: a linear map to logits, and the loss that belongs to it.

A fused loss wants the head's matrix instead of its product, while whoever spread the model has that matrix whole only
during the head's own forward pass (FSDP2 gathers it there). So the loss is computed *inside* the head's forward.
"""

import torch
from torch import nn

from model.loss import HeadLoss


class Head(nn.Linear):
    """Hidden states to logits, or with labels to their loss.

    ``loss`` is given, as an attention module is given its kernel. ``matrix`` returns the rows of the weight that are
    here; ``parallelisms/`` replaces it, and ``loss.vocabulary``, where ranks share the vocabulary.
    """

    def __init__(self, dim: int, vocab_size: int, loss: HeadLoss | None = None):
        super().__init__(dim, vocab_size, bias=False)
        self.loss = HeadLoss() if loss is None else loss

    def matrix(self) -> torch.Tensor:
        """(vocab_size, dim)."""
        return self.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """(B, S, dim) -> (B, S, vocab_size), soft-capped if the loss says so; or a scalar: the summed loss of
        ``labels`` (B, S).
        """
        return self.loss.logits(x, self.matrix()) if labels is None else self.loss(x, self.matrix(), labels)
