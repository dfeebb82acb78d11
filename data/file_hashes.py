"""The sha256 of files' contents, remembered by size, times and inode as git's index remembers them.

Every start of a run must know what it trains on. Reading a corpus of 20,000 files to learn that none has changed takes
seconds in each rank, and much longer from a cold or a network disk; asking for their size and times does not.

What is trusted: a file is read again unless its path, size, modification time, change time (which the kernel sets, not
a program) and inode are what they were when it was read. Two rules cover times that are too coarse to show a change:

* A file that was touched within ``SETTLED_NS`` of being read is not remembered: it could change once more without its
  time changing (git calls such an entry racy). So is one that changed while it was read.
* A change time without a fraction of a second is that of a file system with coarse or made-up times, such as a mounted
  image: such files are read at every start.

What is given up: contents that were changed beneath the file system, or written through a memory map that the kernel
has not yet dated, or a clock that was set back, can go unnoticed. The folder ``hashes`` of the cache may be deleted at
any time; the next start then reads everything.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from config.errors import ConfigError

SETTLED_NS = 10_000_000_000
"""Age of a file's times at which it counts as settled: well above the coarsest clock with fractions of a second, and
room for a file server whose clock is behind."""

CHUNK = 64
"""Files a thread takes at once: most are so small that handing them out singly costs as much as reading them."""

Stamp = tuple[int, int, int, int]
"""Size in bytes, mtime and ctime in ns, inode."""


def content_hashes(paths: Sequence[str], index: Path | None = None) -> list[str]:
    """Hex sha256 of the bytes of each file.

    Args:
        index: file that remembers them between starts; None reads every file. Of the processes of a machine that start
            together, one reads what is not remembered while the others wait for its answers. An index that cannot be
            read or written is done without.

    Raises:
        ConfigError: a file that cannot be read, such as a link to nothing.
    """
    if index is None:
        return [found for found, _ in _read_all(paths)]
    stamps = [_stamp(path) for path in paths]
    before = _identity(index)  # first, so that a renewal while this process reads the index is noticed
    known = _load(index)
    if all(_holds(known, path, stamp) for path, stamp in zip(paths, stamps, strict=True)):
        return [known[path][1] for path in paths]
    with _locked(index):
        if _identity(index) == before:
            return _renew(paths, stamps, known, index)
    # Another process has just renewed it: what is still missing cannot be remembered, and nobody has to wait for it.
    return _renew(paths, stamps, _load(index), None)


def _renew(
    paths: Sequence[str], stamps: Sequence[Stamp], known: dict[str, tuple[Stamp, str]], index: Path | None
) -> list[str]:
    """The hashes, with what ``known`` lacks read from the files, and written to ``index``."""
    missing = [path for path, stamp in zip(paths, stamps, strict=True) if not _holds(known, path, stamp)]
    read = dict(zip(missing, _read_all(missing), strict=True))
    if index is not None:
        kept = {path: known[path] for path in paths if path not in read}
        _store(index, kept | {path: (stamp, found) for path, (found, stamp) in read.items() if stamp is not None})
    return [read[path][0] if path in read else known[path][1] for path in paths]


def _holds(known: dict[str, tuple[Stamp, str]], path: str, stamp: Stamp) -> bool:
    return path in known and known[path][0] == stamp


def _read_all(paths: Sequence[str]) -> list[tuple[str, Stamp | None]]:
    """Hash of each file and its stamp; None for one that must not be remembered."""
    chunks = [paths[start : start + CHUNK] for start in range(0, len(paths), CHUNK)]
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        return [entry for chunk in pool.map(lambda chunk: [_read(path) for path in chunk], chunks) for entry in chunk]


def _read(path: str) -> tuple[str, Stamp | None]:
    try:
        with open(path, "rb") as stream:
            began = time.time_ns()
            before = _of(os.fstat(stream.fileno()))
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            after = _of(os.fstat(stream.fileno()))
    except OSError as error:
        raise _unreadable(path, error) from None
    _, modified, changed, _ = before
    settled = max(modified, changed) + SETTLED_NS < began and changed % 1_000_000_000
    return found, before if settled and before == after else None


def _stamp(path: str) -> Stamp:
    try:
        return _of(os.stat(path))
    except OSError as error:
        raise _unreadable(path, error) from None


def _of(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be read: {error.strerror}; repair or remove it")


def _load(index: Path) -> dict[str, tuple[Stamp, str]]:
    """What is remembered; nothing if the file is missing or not one of ours."""
    try:
        entries = json.loads(index.read_text())
        return {path: ((size, mtime, ctime, inode), found) for path, size, mtime, ctime, inode, found in entries}
    except (OSError, ValueError, TypeError):
        return {}


def _store(index: Path, entries: dict[str, tuple[Stamp, str]]) -> None:
    """Replace the index in one rename. A disk that is full keeps the old one, and nothing of the new."""
    with contextlib.suppress(OSError):
        for leftover in index.parent.glob(f".{index.name}.*"):  # of a process that was killed: we hold the lock
            leftover.unlink()
        descriptor, temporary = tempfile.mkstemp(prefix=f".{index.name}.", dir=index.parent)
        try:
            with open(descriptor, "w") as stream:
                json.dump([(path, *stamp, found) for path, (stamp, found) in entries.items()], stream)
            os.rename(temporary, index)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _identity(index: Path) -> tuple[int, int] | None:
    """Changes with every renewal, which is a new file."""
    with contextlib.suppress(OSError):
        status = index.stat()
        return status.st_ino, status.st_mtime_ns
    return None


@contextlib.contextmanager
def _locked(index: Path) -> Iterator[None]:
    """One process of a machine at a time; without effect where no lock file can be made."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            index.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(index.with_name(index.name + ".lock"), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
