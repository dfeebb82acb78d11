"""A corpus as token ids: written once, then mapped into memory by every process that trains on it."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from config.errors import ConfigError
from data.cache import build_once
from data.documents import Corpus, Document, digest, text_hash
from data.tokenizers import Tokenizer

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raise when what is stored, or how text becomes tokens, changes: older caches are then left alone."""

BATCH_CHARACTERS = 4_000_000
BATCHES_AHEAD = 2
"""Batches in memory beside the one that is written, each about 30 times its text."""

PROGRESS_SECONDS = 15.0


@dataclass
class TokenStore:
    """D documents end to end, each followed by eos."""

    tokens: np.ndarray
    """(N,) unsigned integers, eos included."""
    offsets: np.ndarray
    """(D + 1,) int64: document d is tokens[offsets[d]:offsets[d + 1]]."""
    hashes: np.ndarray
    """(D,) uint64 text hashes, see documents.text_hash."""
    names: Sequence[str]


class NameTable(Sequence[str]):
    """Names in one UTF-8 buffer: a hundred million of them cost no Python objects."""

    def __init__(self, buffer: np.ndarray, ends: np.ndarray) -> None:
        self._buffer, self._ends = buffer, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        start = self._ends[index - 1] if index else 0
        return bytes(self._buffer[start : self._ends[index]]).decode()


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, np.ndarray]]:
    """Each document with its ids, eos last, in order.

    Encoded some megabytes at a time, a few such batches ahead: the cores share a batch document by document, and those
    that are done with its longest one go on with the next batch, as does the reader of files.
    """
    batch: list[Document] = []
    characters = 0
    encoding: deque[tuple[list[Document], Future[list[np.ndarray]]]] = deque()

    def finish() -> Iterator[tuple[Document, np.ndarray]]:
        done, ids = encoding.popleft()
        for document, of_document in zip(done, ids.result(), strict=True):
            yield document, np.append(of_document, tokenizer.eos_id)

    with ThreadPoolExecutor(max_workers=BATCHES_AHEAD) as pool:
        for document in documents:
            batch.append(document)
            characters += len(document.text)
            if characters >= BATCH_CHARACTERS:
                encoding.append((batch, pool.submit(tokenizer.encode_batch, [d.text for d in batch])))
                batch, characters = [], 0
                if len(encoding) > BATCHES_AHEAD:
                    yield from finish()
        encoding.append((batch, pool.submit(tokenizer.encode_batch, [d.text for d in batch])))
        while encoding:
            yield from finish()


def in_memory(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenStore:
    """The store of a few documents, not written anywhere."""
    entries = list(tokenize(documents, tokenizer))
    lengths = [len(ids) for _, ids in entries]
    return TokenStore(
        tokens=np.concatenate([ids for _, ids in entries]) if entries else np.empty(0, dtype=np.int64),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        hashes=np.array([text_hash(d) for d, _ in entries], dtype=np.uint64),
        names=[d.name for d, _ in entries],
    )


def stored(corpus: Corpus, fingerprint: str, tokenizer: Tokenizer, cache: Path) -> TokenStore:
    """The store of ``corpus``, from ``cache`` if this content was tokenised by this tokenizer before, else built there.

    Args:
        fingerprint: ``corpus.fingerprint()``: another content is another cache entry, so nothing old is reused.

    Raises:
        ConfigError: the corpus has no document with text in it, or the cache is damaged or cannot be written.
    """
    folder = build_once(
        cache / digest("tokens", FORMAT, fingerprint, tokenizer.fingerprint),
        lambda target: _write(corpus, tokenizer, target),
    )
    dtype = json.loads((folder / "format.json").read_text())["dtype"]
    store = TokenStore(
        tokens=np.memmap(folder / "tokens.bin", dtype=dtype, mode="r"),
        offsets=np.load(folder / "offsets.npy"),
        hashes=np.load(folder / "hashes.npy"),
        names=NameTable(np.memmap(folder / "names.bin", dtype=np.uint8, mode="r"), np.load(folder / "name_ends.npy")),
    )
    if len(store.tokens) != store.offsets[-1]:
        raise ConfigError(f"data.cache_dir: {str(folder)!r} is damaged; delete that folder and start again")
    return store


def _write(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> None:
    started = said = time.perf_counter()
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    lengths: list[int] = []
    hashes: list[int] = []
    name_lengths: list[int] = []
    with open(folder / "tokens.bin", "wb") as tokens, open(folder / "names.bin", "wb") as names:
        for document, ids in tokenize(corpus.documents(), tokenizer):
            ids.astype(dtype).tofile(tokens)
            lengths.append(len(ids))
            hashes.append(text_hash(document))
            name_lengths.append(names.write(document.name.encode()))
            if time.perf_counter() - said > PROGRESS_SECONDS:
                said = time.perf_counter()
                logger.info("Tokenising, once for this corpus: %d documents, %d tokens", len(lengths), sum(lengths))
    if not lengths:
        raise ConfigError(f"{corpus.key}: the corpus is empty: no document has text in it")
    np.save(folder / "offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    np.save(folder / "hashes.npy", np.array(hashes, dtype=np.uint64))
    np.save(folder / "name_ends.npy", np.cumsum(name_lengths, dtype=np.int64))
    (folder / "format.json").write_text(json.dumps({"dtype": dtype.name, "tokenizer": tokenizer.fingerprint}))
    logger.info(
        "Tokenised %d documents into %d tokens in %.1f s", len(lengths), sum(lengths), time.perf_counter() - started
    )
