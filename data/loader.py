"""The training loader: the content of step s is a function of (corpus, data_seed, s), and ranks slice it.

Global sample j of a step (0 <= j < G) belongs to accumulation step a, data-parallel rank r and row b with
j = (a * dp_degree + r) * local_batch_size + b.
"""

from __future__ import annotations

import copy
import queue
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from config.errors import ConfigError
from data.batch import MicroBatch, StepBatch
from data.mixture import Schedule
from data.packing import PackedSequence, SequenceSource, collate


@dataclass(frozen=True)
class Slicing:
    """How a global batch is cut into micro-batches of ranks."""

    seq_len: int
    local_batch_size: int
    global_batch_size: int
    dp_rank: int
    dp_degree: int

    def __post_init__(self) -> None:
        if not 0 <= self.dp_rank < self.dp_degree:
            raise ValueError(f"dp_rank {self.dp_rank} is not in 0..{self.dp_degree - 1}")
        share = self.local_batch_size * self.dp_degree
        if self.global_batch_size % share:
            raise ConfigError(
                f"training.global_batch_size = {self.global_batch_size}: not a multiple of local_batch_size x "
                f"data-parallel degree = {self.local_batch_size} x {self.dp_degree} = {share}"
            )

    def owner(self, sample: int) -> tuple[int, int]:
        """Accumulation step and data-parallel rank of sample ``sample`` of a step."""
        return divmod(sample // self.local_batch_size, self.dp_degree)


@dataclass
class _Produced:
    batch: StepBatch
    states: list[dict[str, Any]]  # of the sources after this step


class TrainLoader:
    """Steps of one rank, prepared ahead by a background thread when ``prefetch_steps`` > 0."""

    def __init__(
        self,
        sources: list[SequenceSource],
        schedule: Schedule,
        slicing: Slicing,
        *,
        token_bytes: np.ndarray,
        document_mask: bool,
        mask_boundary_labels: bool,
        prefetch_steps: int,
        pin_memory: bool,
        identity: dict[str, Any],
    ) -> None:
        """
        Args:
            identity: what decides the data (corpus hash, seed, batch and sequence size). A saved state of another
                identity is refused.
        """
        self._sources, self._schedule, self._slicing = sources, schedule, slicing
        self._token_bytes, self._document_mask, self._mask_boundary = token_bytes, document_mask, mask_boundary_labels
        self._prefetch_steps, self._identity = prefetch_steps, identity
        self._pin_memory = pin_memory
        self._step = 0
        self._states = [source.state() for source in sources]
        self._worker: _Worker | None = None

    def next_step(self) -> StepBatch:
        """The next step of this rank. Errors of the background thread are raised here."""
        if self._prefetch_steps == 0:
            produced = self._produce(self._step + 1)
        else:
            if self._worker is None:
                # A new thread starts on device 0, and pinning would make a context there: hand it ours.
                device = torch.cuda.current_device() if self._pin_memory else None
                self._worker = _Worker(self._produce, self._step + 1, self._prefetch_steps, device)
                weakref.finalize(self, self._worker.stop)  # the thread ends with the loader, or before the interpreter
            produced = self._worker.get()
        self._step, self._states = produced.batch.step, produced.states
        return produced.batch

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: after the last step handed out, whatever was prefetched. Same on every rank."""
        return {"step": self._step, "sources": copy.deepcopy(self._states), "identity": dict(self._identity)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after ``state["step"]``, exactly, also under another data-parallel degree.

        Raises:
            ConfigError: the state belongs to other data: which keys differ, with both values.
        """
        saved = state["identity"]
        changed = [f"{k} was {saved.get(k)!r}, is {v!r}" for k, v in self._identity.items() if saved.get(k) != v]
        if changed:
            raise ConfigError(
                f"The checkpoint was trained on other data: {'; '.join(changed)}. Resume with the data, seed and batch "
                "of that run, or start a new run."
            )
        self.close()
        self._step = state["step"]
        for source, source_state in zip(self._sources, state["sources"], strict=True):
            source.restore(copy.deepcopy(source_state))
        self._states = copy.deepcopy(state["sources"])

    def close(self) -> None:
        """Stop the background thread. next_step() must not be called again, unless after load_state_dict()."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _produce(self, step: int) -> _Produced:
        cut = self._slicing
        first = (step - 1) * cut.global_batch_size
        rows: list[list[tuple[int, PackedSequence]]] = [
            [] for _ in range(cut.global_batch_size // (cut.local_batch_size * cut.dp_degree))
        ]
        valid = padding = 0
        for sample in range(cut.global_batch_size):
            accumulation, rank = cut.owner(sample)
            source_index, index = self._schedule.locate(first + sample)
            source = self._sources[source_index]
            if rank == cut.dp_rank:
                sequence = source.read(index)
                rows[accumulation].append((first + sample, sequence))
                labels, first_of_document = sequence.labels()
            else:
                labels, first_of_document = source.labels(index)
            valid += labels - first_of_document * self._mask_boundary
            padding += max(0, cut.seq_len - labels - 1)
        micro_batches = [
            collate(
                [sequence for _, sequence in group],
                [sample for sample, _ in group],
                token_bytes=self._token_bytes,
                document_mask=self._document_mask,
                mask_boundary_labels=self._mask_boundary,
            )
            for group in rows
        ]
        if self._pin_memory:
            for micro_batch in micro_batches:
                _pin(micro_batch)
        tokens = cut.global_batch_size * cut.seq_len
        batch = StepBatch(
            step=step,
            micro_batches=micro_batches,
            global_valid_tokens=valid,
            global_tokens=tokens,
            global_padding=padding,
            sample_ids=[sample for group in rows for sample, _ in group],
        )
        return _Produced(batch, [source.state() for source in self._sources])


def _pin(micro_batch: MicroBatch) -> None:
    """Page-locked memory, so that the copy to the device can overlap with work on it."""
    for name in ("tokens", "labels", "positions", "document_ids", "document_starts"):
        tensor = getattr(micro_batch, name)
        setattr(micro_batch, name, None if tensor is None else tensor.pin_memory())


class _Worker:
    """A thread that calls ``produce(step)`` for one step after another, a bounded number ahead.

    ``produce`` is a bound method that is held weakly: the thread keeps no loader alive.
    """

    def __init__(self, produce: Any, first_step: int, ahead: int, device: int | None) -> None:
        self._queue: queue.Queue[_Produced | BaseException] = queue.Queue(maxsize=ahead)
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(weakref.WeakMethod(produce), first_step, device), name="data-prefetch", daemon=True
        )
        self._thread.start()

    def get(self) -> _Produced:
        if self._error is None:
            item = self._queue.get()
            if isinstance(item, _Produced):
                return item
            self._error = item
        raise self._error

    def stop(self) -> None:
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, weak_produce: Any, step: int, device: int | None) -> None:
        item: _Produced | BaseException
        if device is not None:
            torch.cuda.set_device(device)
        while not self._stopping.is_set():
            produce = weak_produce()
            if produce is None:
                return
            try:
                item = produce(step)
            except BaseException as error:
                item = error
            del produce
            while not self._stopping.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return
            step += 1
