"""What the loader hands to the trainer. Shapes: B sequences of a micro-batch, S = training.seq_len."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

IGNORED = -100
"""Label of a position that is not in the loss."""


@dataclass
class MicroBatch:
    """What one rank runs in one forward and backward."""

    tokens: Tensor
    """(B, S) int64."""
    labels: Tensor
    """(B, S) int64: the next token, or -100."""
    positions: Tensor | None
    """(B, S) int64, restarting at 0 with each document; only with data.document_mask."""
    document_ids: Tensor | None
    """(B, S) int32, counting up from 0 in each sequence; attention stays within equal ids. Set as positions are."""
    document_starts: Tensor | None
    """(B, M) int32: where each document of a sequence begins, then S for the rest. M is a power of two, so few shapes
    occur; on a device it says how many documents there may be without a wait. Set as positions are.
    """
    sample_ids: list[int]
    """Global index of each sequence since the start of training (validation: of the window); -1 for padding rows."""
    document_names: list[str]
    """Names of the documents in it, in order of appearance."""
    text_bytes: int
    """UTF-8 bytes of the target tokens that count: bits per byte = summed loss / ln 2 / text_bytes."""


@dataclass
class StepBatch:
    """What one rank trains on in one optimizer step, and how large that step is over all ranks."""

    step: int
    """Counts from 1, as the log lines do."""
    micro_batches: list[MicroBatch]
    global_valid_tokens: int
    """Labels other than -100 in the whole global batch, the same number on every rank."""
    global_tokens: int
    """global_batch_size x seq_len."""
    global_padding: int
    """Of these, positions that hold no token of a document."""
    sample_ids: list[int]
    """Of this rank's sequences, in order."""

    @property
    def fill_rate(self) -> float:
        """Share of the step's positions that hold a token of a document."""
        return 1 - self.global_padding / self.global_tokens
