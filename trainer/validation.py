"""Loss on held-out documents: the same tokens each time, on every mesh."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

from trainer.train_step import MicroBatch


def validate(
    model: nn.Module,
    batches: Iterable[MicroBatch],
    *,
    forward: Callable[[MicroBatch], torch.Tensor | None],
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    counts: bool = True,
) -> dict[str, float]:
    """Evaluate ``model`` on this rank's ``batches``; all ranks must hold equally many.

    Args:
        forward: summed loss of a batch; None where another rank has it, which then counts the batch's tokens too.
        sum_over_ranks: elementwise sum of a float64 vector over the ranks that hold different batches, or parts of one.
        counts: whether this rank counts the tokens and bytes of its batches, of which it may compute a part alone.

    Returns:
        ``validation_metrics/loss`` in nats a token, ``/perplexity``, and ``/bits_per_byte``, which does not depend on
        the tokenizer.

    The model is in evaluation mode meanwhile and no gradient is kept.
    """
    was_training = model.training
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
    with torch.no_grad():
        for batch in batches:
            loss = forward(batch)
            if loss is not None:
                sizes = [int((batch.labels != -100).sum()), batch.text_bytes] if counts else [0, 0]
                totals += torch.stack([loss.double(), *totals.new_tensor(sizes)])
    model.train(was_training)
    loss_sum, all_tokens, all_bytes = sum_over_ranks(totals).tolist()
    mean = loss_sum / all_tokens
    return {
        "validation_metrics/loss": mean,
        "validation_metrics/perplexity": math.exp(min(mean, 700.0)),
        "validation_metrics/bits_per_byte": loss_sum / math.log(2) / all_bytes,
    }
