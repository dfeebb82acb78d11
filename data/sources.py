"""The corpora that ``[data]`` names, their weights in a mixture, and what is known of each once it is tokenised."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import ConfigError
from config.schema import Data
from data.corpora import PythonCorpus, TextCorpus
from data.documents import Corpus, holdout_threshold
from data.stream import StreamCorpus
from data.token_store import TokenStore, stored
from data.tokenizers import Tokenizer

SOURCE_KEYS = ("corpus", "path", "name", "subset", "split", "text_field", "roots", "weight")


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
        ConfigError: a path or data set that is missing or empty, or a mistake in a table of ``data.sources``.
    """
    tables = _mixture(data) if data.corpus == "mixture" else [(_corpus(data), 1.0)]
    return [Source(corpus, weight, corpus.fingerprint()) for corpus, weight in tables]


def _corpus(data: Data) -> Corpus:
    if data.corpus == "python":
        return PythonCorpus(list(data.roots))
    if data.corpus == "text":
        return TextCorpus(data.path, data.text_field)
    return StreamCorpus(data.name, data.subset, data.split, data.text_field)


def _mixture(data: Data) -> list[tuple[Corpus, float]]:
    if not data.sources:
        raise ConfigError(
            'data.sources is empty; data.corpus = "mixture" needs tables such as {corpus = "python", weight = 1.0}'
        )
    corpora: list[tuple[Corpus, float]] = []
    defaults = {f.name: getattr(Data(), f.name) for f in fields(Data)}
    for number, table in enumerate(data.sources):
        where = f"data.sources[{number}]"
        for key in table:
            if key not in SOURCE_KEYS:
                near = get_close_matches(key, SOURCE_KEYS, n=1)
                hint = f" - did you mean {near[0]!r}?" if near else f"; a source has {', '.join(SOURCE_KEYS)}"
                raise ConfigError(f"{where}.{key}: unknown key{hint}")
        kind, weight = table.get("corpus"), table.get("weight")
        if kind not in ("python", "text", "hf"):
            raise ConfigError(f'{where}.corpus = {kind!r}: choose one of "python", "text", "hf"')
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise ConfigError(f"{where}.weight = {weight!r}: must be a number above 0")
        part = {key: value for key, value in table.items() if key != "weight"}
        for key, value in part.items():
            if type(value) is not type(defaults[key]):
                wanted, got = type(defaults[key]).__name__, type(value).__name__
                raise ConfigError(f"{where}.{key} = {value!r}: must be {wanted}, not {got}")
        try:
            corpus = _corpus(Data(**part))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        corpus.key = f"{where}.{corpus.key.removeprefix('data.')}"
        corpora.append((corpus, float(weight)))
    return corpora
