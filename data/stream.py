"""Data sets that are read as a stream with ``datasets``: a hub name or a local folder, of any size.

A stream cannot be entered at a random place, so every rank reads and packs all of it and keeps its slice: the content
of a step is then the same on every mesh. Order: the rows of the data set in windows of 256 training documents, each
window shuffled by (data_seed, number of the window since the start), so that a second epoch differs from the first.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from data.documents import Document, digest, is_held_out, text_hash
from data.packing import PackedSequence, Tape, join, permutation
from data.text_files import row_text
from data.token_store import TokenStore, in_memory
from data.tokenizers import Tokenizer

WINDOW_DOCUMENTS = 256


@dataclass
class StreamCorpus:
    """``datasets.load_dataset(name, subset, split=split, streaming=True)``."""

    kind = "hf"
    name: str
    subset: str = ""
    split: str = "train"
    text_field: str = "text"
    key: str = "data.name"

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError('data.name is empty; data.corpus = "hf" needs a data set: a hub name or a local folder')
        folder = Path(self.name).expanduser()
        self.folder = folder if folder.is_dir() else None
        if self.folder is None and (self.name.startswith((".", "/", "~")) or self.name.count("/") > 1):
            raise ConfigError(f"data.name = {self.name!r}: no such folder")
        if self.folder is not None and not any(p.is_file() for p in self.folder.rglob("*")):
            raise ConfigError(f"data.name = {self.name!r}: the folder is empty")

    def open(self) -> Any:
        """A fresh datasets.IterableDataset at its first row.

        Raises:
            ConfigError: it cannot be opened (no such data set, subset, split or network), with what datasets said.
        """
        import datasets

        return self._or_config_error(
            lambda: datasets.load_dataset(
                str(self.folder or self.name), self.subset or None, split=self.split, streaming=True
            )
        )

    def fingerprint(self, cache: Path | None = None) -> str:
        """Hash of the name, the first window of documents, and the files: names and sizes of a local folder, or what
        datasets knows of the revision of a hub data set. The rest of a stream's content is not read for it, and nothing
        is remembered in ``cache``."""
        import datasets

        if self.folder is not None:
            paths = sorted(p for p in self.folder.rglob("*") if p.is_file())
            files: object = [(p.relative_to(self.folder).as_posix(), p.stat().st_size) for p in paths]
        else:
            files = self._or_config_error(lambda: datasets.load_dataset_builder(self.name, self.subset or None).hash)
        head = []
        for document in self.documents():
            head.append(tuple(document))
            if len(head) == WINDOW_DOCUMENTS:
                break
        return digest("hf", self.subset, self.split, self.text_field, files, head)

    def documents(self) -> Iterator[Document]:
        feed = Feed(self)
        while feed.epoch == 0 and (document := feed.next_document()) is not None:
            yield document

    def _or_config_error(self, action: Any) -> Any:
        try:
            return action()
        except Exception as error:  # datasets raises many kinds for one cause
            where = ", ".join(filter(None, [self.name, self.subset, self.split]))
            raise ConfigError(
                f"data.name = {self.name!r}: datasets cannot open {where}: {type(error).__name__}: {error}\n"
                "Check data.name, data.subset and data.split. Without network use a local folder of .jsonl or .parquet."
            ) from error


class Feed:
    """The rows of a stream one by one, epoch after epoch, with a state that continues exactly."""

    def __init__(self, corpus: StreamCorpus) -> None:
        self._corpus = corpus
        self.epoch = self.rows = 0
        self._open()

    def _open(self, state: Any = None) -> None:
        self._dataset = self._corpus.open()
        if state is not None:
            self._dataset.load_state_dict(copy.deepcopy(state))
        self._iterator = iter(self._dataset)

    def next_document(self) -> Document | None:
        """The next row with text in it; None at the end of an epoch, after which the next epoch begins."""
        while True:
            try:
                row = next(self._iterator)
            except StopIteration:
                if not self.rows:
                    raise ConfigError(f"data.name = {self._corpus.name!r}: the data set is empty") from None
                self.epoch, self.rows = self.epoch + 1, 0
                self._open()
                return None
            self.rows += 1
            where = f"{self._corpus.name}, row {self.rows} of {self._corpus.split}"
            text = row_text(row, self._corpus.text_field, where)
            if text and not text.isspace():
                label = self._corpus.folder.name if self._corpus.folder else self._corpus.name
                return Document(f"{label}/{self._corpus.split}:{self.rows}", text)

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "rows": self.rows, "dataset": copy.deepcopy(self._dataset.state_dict())}

    def restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.rows = state["epoch"], state["rows"]
        self._open(state["dataset"])


class StreamSequences:
    """Packed sequences of a stream's training documents; a SequenceSource that is read in order."""

    def __init__(
        self,
        corpus: StreamCorpus,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        data_seed: int,
        holdout_percent: float,
        label: str,
    ) -> None:
        self._corpus, self._tokenizer = corpus, tokenizer
        self._seq_len, self._seed, self._holdout, self._label = seq_len, data_seed, holdout_percent, label
        self._feed = Feed(corpus)
        self._tapes: deque[tuple[Tape, dict[str, Any]]] = deque()  # each with the feed's state before it
        self._cursor = self._next = self._window = 0

    def read(self, index: int) -> PackedSequence:
        if index != self._next:
            raise ValueError(f"a stream is read in order: asked for sequence {index}, stands at {self._next}")
        length = self._seq_len + 1
        while sum(len(tape) for tape, _ in self._tapes) < self._cursor + length:
            self._append_window()
        pieces, start, missing = [], self._cursor, length
        for tape, _ in self._tapes:
            stop = min(len(tape), start + missing)
            pieces.append(tape.read(start, stop))
            missing -= stop - start
            start = 0
            if not missing:
                break
        self._next += 1
        self._cursor += self._seq_len
        while self._cursor >= len(self._tapes[0][0]):  # at least the last token of this sequence stays
            self._cursor -= len(self._tapes.popleft()[0])
        return join(pieces, length)

    def labels(self, index: int) -> tuple[int, int]:
        return self.read(index).labels()

    def _append_window(self) -> None:
        before = {"window": self._window, **self._feed.state()}
        documents: list[Document] = []
        empty_epochs = 0
        while len(documents) < WINDOW_DOCUMENTS:
            document = self._feed.next_document()
            if document is not None:
                if not is_held_out(text_hash(document), self._holdout):
                    documents.append(document)
                continue
            if documents:
                break
            empty_epochs += 1
            if empty_epochs == 2:
                raise ConfigError(f"data.name = {self._corpus.name!r}: no training document of it has text in it")
        store = in_memory(documents, self._tokenizer)
        order = permutation(len(documents), "window", self._label, self._seed, self._window)
        self._tapes.append((Tape(store, order), before))
        self._window += 1

    def state(self) -> dict[str, Any]:
        before = self._tapes[0][1] if self._tapes else {"window": self._window, **self._feed.state()}
        return {"index": self._next, "cursor": self._cursor, **before}

    def restore(self, state: dict[str, Any]) -> None:
        self._next, self._cursor, self._window = state["index"], state["cursor"], state["window"]
        self._tapes.clear()
        self._feed.restore(state)


def held_out_store(corpus: StreamCorpus, tokenizer: Tokenizer, holdout_percent: float, tokens: int) -> TokenStore:
    """The first held-out documents of the stream that give ``tokens`` tokens, or all there are."""
    documents: list[Document] = []
    found = 0
    for document in corpus.documents():
        if is_held_out(text_hash(document), holdout_percent):
            documents.append(document)
            found += len(tokenizer.encode(document.text)) + 1
            if found >= tokens:
                break
    return in_memory(documents, tokenizer)
