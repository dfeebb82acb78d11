"""How micro-batches go through a model. :class:`Whole`: a rank holds all layers. Else: parallelisms/pipeline.py."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from trainer.spans import BACKWARD, FORWARD, span

Inputs = dict[str, torch.Tensor]
"""A micro-batch on the device: tokens and labels, and as the model takes them positions, document_ids, document_starts,
numbers.
"""
Precision = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes the context of a forward pass."""


class Passes(Protocol):
    """Forward and backward passes of a model, wherever its layers are. All ranks call each method alike."""

    def forward(self, inputs: Inputs) -> torch.Tensor | None:
        """Summed loss of one micro-batch on this rank; None where another rank has it."""

    def forward_backward(self, micro_batches: Sequence[Inputs], valid_tokens: int) -> torch.Tensor:
        """Accumulate the gradient of the summed loss over ``valid_tokens``; return the summed loss, 0 where another
        rank has it.
        """

    def report(self) -> dict[str, float]:
        """Tags of a log step, about the latest ``forward_backward``."""


@dataclass
class Whole:
    """Passes of a model of which this rank holds all layers.

    Args:
        model: called with the inputs; returns the loss of the labels, summed over valid tokens.
        precision: makes the context of a forward pass.
        set_gradient_sync: (model, last) -> None, before each micro-batch: whether it is the last of its step.
    """

    model: nn.Module
    precision: Precision
    set_gradient_sync: Callable[[nn.Module, bool], None]

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Summed loss of one micro-batch."""
        with self.precision():
            return self.model(**inputs)

    def forward_backward(self, micro_batches: Sequence[Inputs], valid_tokens: int) -> torch.Tensor:
        """One micro-batch after the other; gradients are reduced with the last."""
        total = torch.zeros((), device=micro_batches[0]["tokens"].device)
        for i, inputs in enumerate(micro_batches):
            self.set_gradient_sync(self.model, i == len(micro_batches) - 1)
            with span(FORWARD, f"micro-batch {i}"):
                loss_sum = self.forward(inputs)
            with span(BACKWARD, f"micro-batch {i}"):
                (loss_sum / valid_tokens).backward()
            total += loss_sum.detach()
        return total

    def report(self) -> dict[str, float]:
        """Nothing."""
        return {}
