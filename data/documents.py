"""What a corpus is made of, and which documents training never sees."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from config.errors import ConfigError


class Document(NamedTuple):
    """One text and a name that is the same on every machine that holds the corpus."""

    name: str
    text: str


class Corpus(Protocol):
    """A finite collection of documents in a stable order."""

    kind: str
    """Its value of data.corpus."""
    key: str
    """The configuration key that names it, for messages."""

    def fingerprint(self, cache: Path | None = None) -> str:
        """Hex sha256 over everything that decides the documents: options, file names and file contents.

        Args:
            cache: folder that remembers the hashes of unchanged files (data/file_hashes.py); None: every file is read.
        """
        ...

    def documents(self) -> Iterator[Document]:
        """Every document with text in it, in an order that depends on names alone."""
        ...


def text_hash(document: Document) -> int:
    """The first 64 bits of the sha256 of the text: the same in every process and on every machine.

    Raises:
        ConfigError: the text holds lone surrogates (an escape such as ``\\ud800`` in JSON), which UTF-8 cannot hold.
    """
    try:
        encoded = document.text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{document.name}: character {error.start} is a lone surrogate, which is not valid UTF-8; repair the row"
        ) from None
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big")


def holdout_threshold(holdout_percent: float) -> int:
    """Text hashes below this are held out."""
    return int(holdout_percent / 100 * 2**64)


def is_held_out(hash64: int, holdout_percent: float) -> bool:
    """Whether a document of this text hash is validation data.

    It depends on the text alone: a copy under another name, in another source or in a corpus that has grown falls on
    the same side.
    """
    return hash64 < holdout_threshold(holdout_percent)


def digest(*parts: object) -> str:
    """Hex sha256 of ``repr`` of the parts (strings, numbers, tuples of these): the key of everything cached here."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()
