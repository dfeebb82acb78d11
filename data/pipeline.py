"""Everything a run reads: the training loader, the held-out batches, and what the run record says about them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from config.errors import ConfigError
from config.schema import Config
from config.seeds import seeds
from data.bins import PackedEpochs
from data.documents import Document, digest, is_held_out, text_hash
from data.loader import Slicing, TrainLoader
from data.mixture import Schedule
from data.packing import SequenceSource, ShuffledEpochs, Tape, window_count
from data.sources import Source
from data.stream import StreamCorpus, StreamSequences, held_out_store
from data.token_store import FORMAT
from data.tokenizers import Tokenizer
from data.validation import Validation


class DataPipeline:
    """The data of one rank. ``data.build.build_data`` makes it."""

    def __init__(
        self, config: Config, sources: list[Source], tokenizer: Tokenizer, slicing: Slicing, pin_memory: bool
    ) -> None:
        data = config.data
        seed = seeds(config)["data_seed"]
        self._config, self._sources, self._slicing = config, sources, slicing
        self.tokenizer = tokenizer
        # What is trained on: the text, what is held out of it, its tokens, and which of them are targets. Not
        # document_mask and packing, which change what attention sees of the same tokens, and not the order (data_seed).
        self.corpus_hash = digest(
            FORMAT,
            [(s.fingerprint, s.weight) for s in sources],
            data.holdout_percent,
            tokenizer.fingerprint,
            data.mask_boundary_labels,
        )
        self._schedule = Schedule([s.weight for s in sources], seed)
        self._packed = [self._sequences(source, seed, f"source {i}") for i, source in enumerate(sources)]
        self.train = TrainLoader(
            self._packed,
            self._schedule,
            slicing,
            token_bytes=tokenizer.token_bytes,
            document_mask=data.document_mask,
            mask_boundary_labels=data.mask_boundary_labels,
            prefetch_steps=data.prefetch_steps,
            pin_memory=pin_memory,
            identity={
                "corpus_hash": self.corpus_hash,
                "data.packing": data.packing,
                "debug.data_seed": seed,
                "training.global_batch_size": slicing.global_batch_size,
                "training.seq_len": slicing.seq_len,
            },
        )

    def _sequences(self, source: Source, seed: int, label: str) -> SequenceSource:
        seq_len = self._slicing.seq_len
        if source.documents is not None:
            store, training = source.documents.store, source.documents.training
            packing = self._config.data.packing
            if packing == "split_fill":
                return ShuffledEpochs(store, training, seq_len=seq_len, data_seed=seed, label=label)
            return PackedEpochs(
                store,
                training,
                packing=packing,
                seq_len=seq_len,
                data_seed=seed,
                label=label,
                fill=self.tokenizer.eos_id,
            )
        assert isinstance(source.corpus, StreamCorpus)
        return StreamSequences(
            source.corpus,
            self.tokenizer,
            seq_len=seq_len,
            data_seed=seed,
            holdout_percent=self._config.data.holdout_percent,
            label=label,
        )

    @functools.cached_property
    def _validation(self) -> Validation:
        """The held-out batches of this rank, as ``[validation]`` says.

        Evaluated are ``steps * local_batch_size`` sequences, whatever the number of ranks; of a mixture, each source's
        share by weight. With steps = -1 it is all that is held out.

        Raises:
            ConfigError: nothing is held out, or steps = -1 on a stream, whose held-out documents have no end.
        """
        section, percent = self._config.validation, self._config.data.holdout_percent
        limits: list[int | None] = [None] * len(self._sources)
        if section.steps >= 0:
            limits = list(self._schedule.counts(np.array([section.steps * section.local_batch_size]))[:, 0].tolist())
        tapes = [(self._held_out_tape(s, limit), limit) for s, limit in zip(self._sources, limits, strict=True)]
        if not any(window_count(len(tape), self._slicing.seq_len) for tape, _ in tapes):
            raise ConfigError(
                f"data.holdout_percent = {percent}: no document is held out, so there is nothing to validate on; "
                "raise it, train on more documents, or set validation.enable = false"
            )
        return Validation(
            tapes=tapes,
            seq_len=self._slicing.seq_len,
            local_batch_size=section.local_batch_size,
            dp_rank=self._slicing.dp_rank,
            dp_degree=self._slicing.dp_degree,
            eos_id=self.tokenizer.eos_id,
            token_bytes=self.tokenizer.token_bytes,
            document_mask=self._config.data.document_mask,
            mask_boundary_labels=self._config.data.mask_boundary_labels,
        )

    def validation(self) -> Validation:
        """The held-out batches of this rank, found once: a stream is read to find them.

        Raises:
            ConfigError: there are none, or validation.steps = -1 asks for all of a stream.
        """
        return self._validation

    def _held_out_tape(self, source: Source, limit: int | None) -> Tape:
        if source.documents is not None:
            return Tape(source.documents.store, source.documents.held_out)
        if limit is None:
            raise ConfigError('validation.steps = -1: a stream (data.corpus = "hf") has no end; set validation.steps')
        assert isinstance(source.corpus, StreamCorpus)
        tokens = limit * self._slicing.seq_len + 1
        store = held_out_store(source.corpus, self.tokenizer, self._config.data.holdout_percent, tokens)
        return Tape(store, np.arange(len(store.names)))

    def held_out_documents(self) -> Iterator[Document]:
        """Name and text of every held-out document, read from the corpus again."""
        for source in self._sources:
            for document in source.corpus.documents():
                if is_held_out(text_hash(document), self._config.data.holdout_percent):
                    yield document

    def describe(self) -> dict[str, Any]:
        """For the log and the run record.

        ``documents``, ``held_out_documents``, ``tokens`` (training tokens of one epoch, eos included) and ``epochs`` of
        this run; of a stream they are None. ``sources`` has the same for each corpus. ``warnings`` are sentences.
        """
        described = [source.describe() for source in self._sources]
        tokens_per_step = self._slicing.global_batch_size * self._slicing.seq_len
        trained = self._config.training.steps * tokens_per_step
        total_weight = sum(source.weight for source in self._sources)
        warnings = []
        for numbers, packed in zip(described, self._packed, strict=True):
            numbers["epochs"] = None
            if numbers["tokens"] is not None:
                numbers["epochs"] = trained * numbers["weight"] / total_weight / numbers["tokens"]
                if isinstance(packed, PackedEpochs):
                    numbers["epochs"] *= numbers["tokens"] / (packed.sequences_per_epoch() * self._slicing.seq_len)
                if numbers["epochs"] > 1:
                    warnings.append(
                        f"The run reads the {numbers['tokens']:,} tokens of the {numbers['corpus']} corpus "
                        f"{numbers['epochs']:.1f} times: its training loss is not that of fresh data"
                    )
        return {
            "corpus_hash": self.corpus_hash,
            "tokenizer": {"vocab_size": self.tokenizer.vocab_size, "fingerprint": self.tokenizer.fingerprint},
            **{key: _total([d[key] for d in described]) for key in ("documents", "held_out_documents", "tokens")},
            "tokens_per_step": tokens_per_step,
            "epochs": described[0]["epochs"] if len(described) == 1 else None,
            "sources": described,
            "warnings": warnings,
        }

    def close(self) -> None:
        """Stop the background thread."""
        self.train.close()


def _total(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
