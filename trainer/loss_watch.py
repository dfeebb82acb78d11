"""Losses of the steps since the last log line: their global mean, and which step went wrong."""

import logging
import math
from collections.abc import Callable

import torch

from trainer.train_step import StepBatch, StepResult

logger = logging.getLogger(__name__)


class NonFiniteLoss(RuntimeError):
    """A loss is NaN or infinite. The message names the step and the documents it was computed from."""


class LossWatch:
    """Judges steps by their loss and gradient norm.

    Args:
        sum_over_ranks: elementwise sum of a float64 vector over the ranks that hold different tokens.
        skip: True: look at each step before its update, which waits for the device every step, and veto a step that is
            not finite. False: look when ``latest`` is called, and raise.
        sum_over_sequence: elementwise sum over the ranks that hold other parts of the same sequences.
        gather: a list of names -> the lists of all ranks, to say whose documents a bad step was computed from.
    """

    def __init__(
        self,
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
        *,
        skip: bool,
        sum_over_sequence: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
        gather: Callable[[list[str]], list[list[str]]] = lambda names: [names],
    ):
        self._sum = sum_over_ranks
        self._sum_over_sequence = sum_over_sequence
        self._gather = gather
        self._skip = skip
        self._seen: list[tuple[StepBatch, StepResult]] = []
        self._last = math.nan, math.nan
        self.step = 0
        """The latest step that ran."""
        self.skipped_steps = 0

    def accept(self, batch: StepBatch, result: StepResult) -> bool:
        """Whether the optimizer may take this step; the same on every rank."""
        self.step = batch.step
        if self._skip:
            total, norm = self._totals([(batch, result)])[0]
            if not _finite(total, norm):
                self.skipped_steps += 1
                logger.warning("Skipped the update of %s", self._describe(batch, result, total, norm))
                return False
        self._seen.append((batch, result))
        return True

    def latest(self) -> tuple[float, float]:
        """Loss of the latest accepted step, nats a token: the global mean and that of the sequences this rank reads.

        NaN before the first. Every rank calls it; waits for the device.

        Raises:
            NonFiniteLoss: on every rank alike, naming the first step whose loss or gradient norm is not finite.
        """
        if not self._seen:
            return self._last
        totals = self._totals(self._seen)
        for (batch, result), (total, norm) in zip(self._seen, totals, strict=True):
            if not _finite(total, norm):
                advice = 'To drop such steps and go on: training.nonfinite_loss = "skip".'
                raise NonFiniteLoss(f"{self._describe(batch, result, total, norm)}. {advice}")
        batch, result = self._seen[-1]
        local_tokens = sum(int((m.labels != -100).sum()) for m in batch.micro_batches)
        local_sum = self._sum_over_sequence(result.loss_sum).item()
        self._last = totals[-1][0] / batch.global_valid_tokens, local_sum / max(1, local_tokens)
        self._seen.clear()
        return self._last

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"step": self.step, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting."""
        self.step, self.skipped_steps = state["step"], state["skipped_steps"]

    def counts(self) -> dict[str, float]:
        """Tag -> value for the log: the steps skipped so far, where skipping is on."""
        return {"loss_metrics/skipped_steps": self.skipped_steps} if self._skip else {}

    def _totals(self, steps: list[tuple[StepBatch, StepResult]]) -> list[tuple[float, float]]:
        """(loss summed over ranks, gradient norm) of each step, in one transfer from the device."""
        sums = self._sum(torch.stack([result.loss_sum.double() for _, result in steps]))
        norms = torch.stack([result.grad_norm.double() for _, result in steps]).to(sums.device)
        return list(zip(*torch.stack([sums, norms]).tolist(), strict=True))

    def _describe(self, batch: StepBatch, result: StepResult, total: float, norm: float) -> str:
        """The step, and the documents of the ranks whose loss is to blame; of all ranks where no one loss is."""
        to_blame = math.isfinite(total) or not math.isfinite(result.loss_sum.item())
        mine = [name for m in batch.micro_batches for name in m.document_names] if to_blame else []
        documents = list(dict.fromkeys(name for names in self._gather(mine) for name in names))
        more = f" and {len(documents) - 12} more" if len(documents) > 12 else ""
        return (
            f"step {batch.step}: loss {total / batch.global_valid_tokens}, gradient norm {norm}; "
            f"documents: {', '.join(documents[:12])}{more}"
        )


def _finite(*values: float) -> bool:
    return all(math.isfinite(v) for v in values)
