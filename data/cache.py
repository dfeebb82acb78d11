"""A folder that is built once: by one process, completely, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from config.errors import ConfigError


def cache_root(cache_dir: str) -> Path:
    """``data.cache_dir``, or ablation-trainer under XDG_CACHE_HOME or ~/.cache when it is empty."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ablation-trainer"


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """``folder``, built by ``build(temporary folder)`` if it does not exist.

    Processes of one machine wait for each other on a lock beside it. Machines that share the cache without a working
    lock each build, and the first rename wins. The folder appears by that rename only: it is never seen half-written.

    Raises:
        ConfigError: the cache cannot be written. Whatever ``build`` raises passes through, and leaves nothing behind.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_name(folder.name + ".lock"), "w")
    except OSError as error:
        raise ConfigError(
            f"data.cache_dir: cannot write {str(folder.parent)!r} ({error.strerror}); set it to a folder you own"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        prefix = f".{folder.name}."
        for leftover in folder.parent.glob(prefix + "*"):  # of a process that was killed: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            build(temporary)
            _sync(temporary)
            os.rename(temporary, folder)
        except OSError as error:
            if not folder.is_dir():  # else another machine was first, and its copy is as good
                raise ConfigError(f"data.cache_dir: writing {str(folder)!r} failed: {error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _sync(folder: Path) -> None:
    """Push the files to the disk before the rename publishes them."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
