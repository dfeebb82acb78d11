"""One optimizer step: forward and backward over the micro-batches, gradient norm, clipping, update."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

import titan


class MicroBatch(Protocol):
    """What training and validation read of data.batch.MicroBatch."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None
    document_ids: torch.Tensor | None
    document_names: list[str]
    text_bytes: int


class StepBatch(Protocol):
    """What a step reads of data.batch.StepBatch."""

    step: int
    micro_batches: Sequence[MicroBatch]
    global_valid_tokens: int


@dataclass
class StepResult:
    """Device scalars; reading one synchronises."""

    loss_sum: torch.Tensor
    """This rank's loss summed over its valid tokens, float32."""
    grad_norm: torch.Tensor
    """L2 norm of the whole model's gradient of the global mean loss, before clipping."""


Accept = Callable[[StepBatch, StepResult], bool]


@dataclass
class TrainStep:
    """The parts of a step, and how they fit together.

    Args:
        model: called with (tokens, positions, document_ids); returns logits.
        loss: (logits, labels) -> the sum over valid tokens.
        optimizer: updates the model's parameters.
        device: where batches go.
        precision: makes the context of a forward pass.
        set_gradient_sync: (model, enabled) -> None, whether the next backward pass reduces gradients over ranks.
        max_norm: clipping threshold; 0 measures the norm and does not clip.
        accept: (batch, result) -> whether the update may be taken, asked after clipping.
    """

    model: nn.Module
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    device: torch.device
    precision: Callable[[], contextlib.AbstractContextManager[None]]
    set_gradient_sync: Callable[[nn.Module, bool], None]
    max_norm: float
    accept: Accept

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Summed loss of one micro-batch on this rank."""

        def here(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(self.device, non_blocking=True)

        with self.precision():
            logits = self.model(
                here(micro_batch.tokens),
                positions=here(micro_batch.positions),
                document_ids=here(micro_batch.document_ids),
            )
        return self.loss(logits, here(micro_batch.labels))  # type: ignore[arg-type]

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Accumulate the gradient of the global mean loss; return this rank's loss sum.

        Every token weighs 1 / global_valid_tokens, on whichever rank and in whichever micro-batch it is: gradients
        only have to be summed.
        """
        total = torch.zeros((), device=self.device)
        for i, micro_batch in enumerate(batch.micro_batches):
            self.set_gradient_sync(self.model, i == len(batch.micro_batches) - 1)
            loss_sum = self.forward(micro_batch)
            (loss_sum / batch.global_valid_tokens).backward()
            total += loss_sum.detach()
        return total

    def clip(self) -> torch.Tensor:
        """Clip the gradient in place and return its norm before clipping."""
        return titan.clip_grad_norm_(self.model.parameters(), self.max_norm or math.inf)

    def __call__(self, batch: StepBatch) -> StepResult:
        """Run one step. A step that ``accept`` refuses leaves the weights as they were."""
        self.optimizer.zero_grad()
        result = StepResult(self.forward_backward(batch), self.clip())
        if self.accept(batch, result):
            self.optimizer.step()
        return result
