"""The corpora that ``[data]`` names, their weights in a mixture, and what is known of each once it is tokenised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import ConfigError
from config.schema import Data
from data.cache import cache_root
from data.corpora import PythonCorpus, TextCorpus
from data.documents import Corpus, holdout_threshold
from data.stream import StreamCorpus
from data.token_store import TokenStore, stored
from data.tokenizers import Tokenizer


@dataclass
class StoredDocuments:
    """A finite corpus as tokens, and which of its documents are for training."""

    store: TokenStore
    training: np.ndarray
    """Indices of training documents in the store, at least one."""
    held_out: np.ndarray
    """Indices of held-out documents, by text hash: the first few are not the alphabet's first few."""


@dataclass
class Source:
    """One corpus of a run. A run without a mixture has one."""

    corpus: Corpus
    weight: float
    fingerprint: str
    documents: StoredDocuments | None = None
    """None before ``open_store``, and always for a stream."""

    def open_store(self, tokenizer: Tokenizer, holdout_percent: float, cache: Path) -> None:
        """Tokenise a finite corpus, or take it from the cache.

        Raises:
            ConfigError: no document, or none that is not held out.
        """
        if isinstance(self.corpus, StreamCorpus):
            return
        store = stored(self.corpus, self.fingerprint, tokenizer, cache)
        is_held = store.hashes < np.uint64(holdout_threshold(holdout_percent))
        held = np.flatnonzero(is_held)
        held = held[np.argsort(store.hashes[held], kind="stable")]
        self.documents = StoredDocuments(store, np.flatnonzero(~is_held), held)
        if is_held.all():
            raise ConfigError(
                f"data.holdout_percent = {holdout_percent}: every document of {self.corpus.key} ({len(held)}) is held "
                "out and none is left to train on; lower it or train on more documents"
            )

    def describe(self) -> dict[str, Any]:
        """Documents and tokens; None for a stream, which is not read to its end."""
        numbers: dict[str, Any] = {
            "corpus": self.corpus.kind,
            "fingerprint": self.fingerprint,
            "weight": self.weight,
            "documents": None,
            "held_out_documents": None,
            "tokens": None,
            "held_out_tokens": None,
        }
        if self.documents is not None:
            lengths = np.diff(self.documents.store.offsets)
            numbers["documents"] = len(self.documents.training)
            numbers["held_out_documents"] = len(self.documents.held_out)
            numbers["tokens"] = int(lengths[self.documents.training].sum())
            numbers["held_out_tokens"] = int(lengths[self.documents.held_out].sum())
        return numbers


def open_sources(data: Data) -> list[Source]:
    """The corpora of ``[data]``, read far enough to know that they exist and what their fingerprint is.

    Raises:
        ConfigError: a path or data set that is missing or empty.
    """
    tables = _mixture(data) if data.corpus == "mixture" else [(_corpus(data), 1.0)]
    hashes = cache_root(data.cache_dir) / "hashes"
    return [Source(corpus, weight, corpus.fingerprint(hashes)) for corpus, weight in tables]


def _corpus(data: Data) -> Corpus:
    if data.corpus == "python":
        return PythonCorpus(list(data.roots))
    if data.corpus == "text":
        return TextCorpus(data.path, data.text_field)
    return StreamCorpus(data.name, data.subset, data.split, data.text_field)


def _mixture(data: Data) -> list[tuple[Corpus, float]]:
    """The tables of ``data.sources``, whose keys and types config/rules.py has checked."""
    corpora: list[tuple[Corpus, float]] = []
    for number, table in enumerate(data.sources, start=1):
        where = f"data.sources, table {number}"
        try:
            corpus = _corpus(Data(**{key: value for key, value in table.items() if key != "weight"}))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        corpus.key = f"{where}: {corpus.key}"
        corpora.append((corpus, float(table["weight"])))
    return corpora
