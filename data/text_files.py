"""Text out of .txt, .jsonl and .parquet files, with errors that name the file, the line and the fix."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from data.documents import Document

SUFFIXES = (".txt", ".txt.gz", ".txt.xz", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")

TXT_DOCUMENT_BYTES = 32 * 1024
"""A longer .txt file is cut into documents of about this size at line ends, so that it has parts to hold out."""


def read_text_file(name: str, path: Path, text_field: str) -> Iterator[Document]:
    """The documents of one file, named ``name`` (.txt), ``name#part`` (a long .txt) or ``name:row`` (from 1).

    Documents without a character other than white space are left out.

    Raises:
        ConfigError: not UTF-8 (file and line); a row that is not JSON, or without ``text_field``, or with something
            other than text in it (file, row, field, the fields there are); a damaged archive.
    """
    if path.name.endswith(".parquet"):
        documents = _parquet(name, path, text_field)
    elif ".jsonl" in path.name:
        documents = _jsonl(name, path, text_field)
    else:
        documents = _txt(name, path)
    return (document for document in documents if document.text and not document.text.isspace())


def row_text(row: Any, text_field: str, where: str) -> str:
    """``row[text_field]``, or the ConfigError that says what the row at ``where`` has instead."""
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: the row is {type(row).__name__}, not an object with a field {text_field!r}")
    if text_field not in row:
        there = ", ".join(map(repr, row)) or "no fields"
        raise ConfigError(f"{where}: no field {text_field!r} (data.text_field); the row has {there}")
    text = row[text_field]
    if not isinstance(text, str):
        raise ConfigError(f"{where}: field {text_field!r} (data.text_field) holds {type(text).__name__}, not text")
    return text


def _txt(name: str, path: Path) -> Iterator[Document]:
    part: list[str] = []
    size = count = 0
    for _, line in _lines(path):
        part.append(line)
        size += len(line.encode())
        if size >= TXT_DOCUMENT_BYTES:
            count += 1
            yield Document(f"{name}#{count}", "".join(part))
            part, size = [], 0
    yield Document(f"{name}#{count + 1}" if count else name, "".join(part))


def _jsonl(name: str, path: Path, text_field: str) -> Iterator[Document]:
    for number, line in _lines(path):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            what = f"{error.msg} at column {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            raise ConfigError(f"{path}:{number}: not JSON: {what}") from None
        yield Document(f"{name}:{number}", row_text(row, text_field, f"{path}:{number}"))


def _parquet(name: str, path: Path, text_field: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file: {error}") from None
    with table:
        fields = table.schema_arrow.names
        if text_field not in fields:
            there = ", ".join(map(repr, fields))
            raise ConfigError(f"{path}: no field {text_field!r} (data.text_field); the file has {there}")
        number = 0
        for batch in table.iter_batches(columns=[text_field]):
            for text in batch.column(0).to_pylist():
                number += 1
                where = f"{path}: row {number}"
                yield Document(f"{name}:{number}", row_text({text_field: text}, text_field, where))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their number from 1 and their line end, whatever the compression."""
    opened: Iterable[bytes]
    if path.name.endswith(".gz"):
        opened = gzip.open(path, "rb")
    elif path.name.endswith(".xz"):
        opened = lzma.open(path, "rb")
    else:
        opened = open(path, "rb")
    number = 0
    try:
        with opened as stream:  # type: ignore[attr-defined]
            for raw in stream:
                number += 1
                yield number, raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}:{number}: not UTF-8 (byte 0x{error.object[error.start]:02x} at column {error.start + 1}); "
            "convert the file to UTF-8"
        ) from None
    except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ConfigError(f"{path}: damaged archive after line {number}: {error}") from None
