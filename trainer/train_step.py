"""One optimizer step: forward and backward over the micro-batches, gradient norm, clipping, update."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from trainer.passes import Inputs, Passes
from trainer.spans import OPTIMIZER, span


class MicroBatch(Protocol):
    """What training and validation read of data.batch.MicroBatch."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None
    document_ids: torch.Tensor | None
    document_starts: torch.Tensor | None
    sample_ids: list[int]
    document_names: list[str]
    text_bytes: int


class StepBatch(Protocol):
    """What a step reads of data.batch.StepBatch."""

    step: int
    global_valid_tokens: int

    @property
    def micro_batches(self) -> Sequence[MicroBatch]: ...


@dataclass
class StepResult:
    """Device scalars; reading one synchronises."""

    loss_sum: torch.Tensor
    """This rank's loss summed over its valid tokens, float32."""
    grad_norm: torch.Tensor
    """L2 norm of the whole model's gradient of the global mean loss, before clipping."""


Accept = Callable[[StepBatch, StepResult], bool]


class ExpertStep(Protocol):
    """What a step does for a model with experts (model/expert_step.py)."""

    @property
    def loads(self) -> torch.Tensor: ...

    def report(self, micro_batch: Any, forward: Callable[[Any], object]) -> dict[str, float]: ...

    def numbers(self, labels: torch.Tensor, sample_ids: list[int]) -> torch.Tensor: ...

    def begin(self, step: int, micro_batches: Sequence[Any], route: Callable[[Any], None]) -> None: ...

    def end(self, step: int) -> None: ...

    def drop(self) -> None: ...


@dataclass
class TrainStep:
    """The parts of a step, and how they fit together.

    Args:
        model: what this rank holds of it.
        passes: take micro-batches through the model.
        optimizer: updates the model's parameters.
        device: where batches go.
        precision: makes the context of a forward pass.
        clip_grad_norm: (model, max_norm) -> the gradient's norm before clipping to max_norm; 0 does not clip.
        max_norm: clipping threshold; 0 measures the norm and does not clip.
        accept: (batch, result) -> whether the update may be taken, asked after clipping.
        experts: balances the load of a model that has experts.
        own_part: what this rank computes of a micro-batch that other ranks have too.
        after_update: what has to follow an update of the weights.
    """

    model: nn.Module
    passes: Passes
    optimizer: torch.optim.Optimizer
    device: torch.device
    precision: Callable[[], contextlib.AbstractContextManager[None]]
    clip_grad_norm: Callable[[nn.Module, float], torch.Tensor]
    max_norm: float
    accept: Accept
    experts: ExpertStep | None = None
    own_part: Callable[[Inputs], Inputs] = lambda inputs: inputs
    after_update: Callable[[], None] = lambda: None

    def inputs(self, micro_batch: MicroBatch) -> Inputs:
        """This rank's part of ``micro_batch``, on the device."""
        names = ("tokens", "labels", "positions", "document_ids", "document_starts")
        inputs = {name: getattr(micro_batch, name) for name in names}
        if self.experts is not None:
            inputs["numbers"] = self.experts.numbers(micro_batch.labels, micro_batch.sample_ids)
        held = self.own_part({name: x for name, x in inputs.items() if x is not None})
        return {name: x.to(self.device, non_blocking=True) for name, x in held.items()}

    def forward(self, micro_batch: MicroBatch) -> torch.Tensor | None:
        """Summed loss of one micro-batch on this rank; None where another rank has it."""
        return self.passes.forward(self.inputs(micro_batch))

    def route(self, micro_batch: MicroBatch) -> None:
        """Run one micro-batch for the load of its experts alone."""
        inputs = self.inputs(micro_batch)
        del inputs["labels"]
        with self.precision():
            self.model.count_global(**inputs)

    def forward_backward(self, batch: StepBatch) -> torch.Tensor:
        """Accumulate the gradient of the global mean loss; return this rank's loss sum.

        Every token weighs 1 / global_valid_tokens, on whichever rank and in whichever micro-batch it is: gradients
        only have to be summed.
        """
        if self.experts is not None:
            self.experts.begin(batch.step, batch.micro_batches, self.route)
        return self.passes.forward_backward([self.inputs(m) for m in batch.micro_batches], batch.global_valid_tokens)

    def clip(self) -> torch.Tensor:
        """Clip the gradient in place and return its norm before clipping."""
        return self.clip_grad_norm(self.model, self.max_norm)

    def __call__(self, batch: StepBatch) -> StepResult:
        """Run one step. A step that ``accept`` refuses leaves the weights as they were."""
        self.optimizer.zero_grad()
        loss_sum = self.forward_backward(batch)
        with span(OPTIMIZER):
            result = StepResult(loss_sum, self.clip())
            if self.accept(batch, result):
                self.update(batch)
            elif self.experts is not None:
                self.experts.drop()
        return result

    def update(self, batch: StepBatch) -> None:
        """Take the optimizer's step, then act on the load of the experts."""
        self.optimizer.step()
        self.after_update()
        if self.experts is not None:
            self.experts.end(batch.step)
