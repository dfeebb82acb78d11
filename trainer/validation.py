"""Loss on held-out documents: the same tokens each time, on every mesh."""

import math
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from trainer.train_step import MicroBatch


class ValidationBatch(MicroBatch, Protocol):
    """A micro-batch that knows the size of its text."""

    text_bytes: int


def validate(
    model: nn.Module,
    batches: Iterable[ValidationBatch],
    *,
    forward: Callable[[MicroBatch], torch.Tensor],
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, float]:
    """Evaluate ``model`` on this rank's ``batches``; all ranks must hold equally many.

    Args:
        forward: summed loss of a batch.
        sum_over_ranks: elementwise sum of a float64 vector over the ranks that hold different batches.

    Returns:
        ``validation_metrics/loss`` in nats a token, ``/perplexity``, and ``/bits_per_byte``, which does not depend on the
        tokenizer.

    The model is in evaluation mode meanwhile and no gradient is kept.
    """
    was_training = model.training
    model.eval()
    loss, tokens, text_bytes = torch.zeros((), dtype=torch.float64), 0, 0
    losses = []
    with torch.no_grad():
        for batch in batches:
            losses.append(forward(batch))
            tokens += int((batch.labels != -100).sum())
            text_bytes += batch.text_bytes
    if losses:
        loss = torch.stack(losses).double().sum()
    device = loss.device
    total = sum_over_ranks(torch.stack([loss, loss.new_tensor(tokens), loss.new_tensor(text_bytes)]).to(device)).tolist()
    model.train(was_training)
    mean = total[0] / total[1]
    return {
        "validation_metrics/loss": mean,
        "validation_metrics/perplexity": math.exp(min(mean, 700.0)),
        "validation_metrics/bits_per_byte": total[0] / math.log(2) / total[2],
    }
