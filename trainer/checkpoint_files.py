"""The files of a checkpoint: whether they are whole, and one sentence where one of them cannot be read or written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from config.errors import ConfigError


def check_files(folder: Path) -> Metadata:
    """The index of a complete checkpoint, of which no file is missing or cut short. Looks at sizes alone.

    Raises:
        ConfigError: the first file that is, or the index cannot be read; and what to do without it.
    """
    try:
        index = FileSystemReader(folder).read_metadata()
        ends: dict[str, int] = {}
        for piece in index.storage_data.values():
            ends[piece.relative_path] = max(ends.get(piece.relative_path, 0), piece.offset + piece.length)
    except Exception as error:  # what unpickling a damaged index raises depends on the damage
        raise _damaged(folder, f".metadata cannot be read ({_named(error)})") from None
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file():
            raise _damaged(folder, f"{name} is missing")
        if (size := path.stat().st_size) < end:
            raise _damaged(folder, f"{name} has {size:,} bytes of {end:,}")
    return index


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Around a load from ``folder``: what torch finds wrong with its files becomes one sentence.

    Raises:
        ConfigError: in place of torch's CheckpointException, which no ``except Exception`` catches, and which holds a
            traceback of each rank.
    """
    try:
        with _single_process_is_meant():
            yield
    except CheckpointException as error:
        raise _damaged(folder, _of_the_first_rank(error)) from None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Around a save to ``folder``, with the cause of a failure in place of torch's CheckpointException.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    try:
        with _single_process_is_meant():
            yield
    except CheckpointException as error:
        cause = min(error.failures.items())[1][0]
        if isinstance(cause, OSError) and cause.errno is not None:
            raise OSError(cause.errno, cause.strerror, cause.filename or str(folder)) from None
        raise OSError(f"{folder} cannot be written: {_of_the_first_rank(error)}") from None


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as no_dist says
        yield


def _of_the_first_rank(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {_named(cause)}"


def _named(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _damaged(folder: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"{folder}: {problem}: this checkpoint is damaged. Use another step, or move this folder away: the newest of"
        " the others is then taken."
    )
