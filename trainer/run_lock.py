"""The lock that one process holds on a run directory: the kernel drops it when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from config.errors import ConfigError
from config.keys import shown

LOCK = ".lock"
WAIT_SECONDS = 2.0

logger = logging.getLogger(__name__)


def hold(path: Path) -> int | None:
    """Hold the directory until the process ends or closes the descriptor. None where the file system has no locks.

    Raises:
        ConfigError: another process holds it.
    """
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + WAIT_SECONDS  # whoever asks for the holder has the lock for an instant
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            os.close(descriptor)
            raise ConfigError(
                f"job.run_dir = {shown(str(path))}: is in use by process {_holder_name(path)}."
                " Wait for it, or choose another run_dir."
            ) from None
        except OSError as error:
            os.close(descriptor)
            logger.warning("%s: no file lock (%s); nothing keeps a second run out", path, error.strerror)
            return None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def holder(path: Path) -> str:
    """The process that holds the directory, or nothing."""
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except BlockingIOError:
        return _holder_name(path)
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _holder_name(path: Path) -> str:
    return (path / LOCK).read_text(encoding="ascii", errors="replace") or "unknown"
