"""One runner at a time in an ablation directory.

The lock is an ``flock``. The running child inherits its descriptor, so after ``kill -9`` of the runner the lock is held
exactly until the orphaned run has ended: a second runner can neither start beside a live one nor start a run that is
still being written. The kernel releases it; there is no stale file to delete.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from config.errors import ConfigError

KILLED_SECONDS = 0.5  # a runner killed a moment ago still holds what the kernel has not taken back


class Lock:
    """An acquired lock. ``fd`` is to be inherited by children; leaving the ``with`` block releases it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def _holder(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _alive(holder: dict[str, object]) -> bool:
    """Whether the recorded runner still runs; a runner of another host counts as alive, a zombie does not (a killed
    runner stays one where nobody waits for it, as in many containers).
    """
    if holder.get("host") != platform.node():
        return True
    pid = holder.get("pid")
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True


def acquire(
    path: Path, *, shared: bool = False, orphan_seconds: float = 60.0, say: Callable[[str], None] = print
) -> Lock:
    """Take the lock at ``path``, its folder made if needed.

    Args:
        shared: several holders may share it (the tasks of a job array); an exclusive holder excludes them all.
        orphan_seconds: how long to wait for the last run of a runner that is gone.

    Raises:
        ConfigError: another runner holds it, or an orphaned run does not end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    began, told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(fd, mode)
            break
        except BlockingIOError:
            holder = _holder(path)
            who = f"pid {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('started', '?')}"
            waited = time.monotonic() - began
            if _alive(holder):
                if waited < KILLED_SECONDS:
                    time.sleep(0.05)
                    continue
                os.close(fd)
                raise ConfigError(f"{path}: another runner ({who}) works here; wait for it or stop it") from None
            if not told:
                say(f"the runner before ({who}) is gone; waiting for the run it left behind to end")
                told = True
            if waited > orphan_seconds:
                os.close(fd)
                raise ConfigError(
                    f"{path.parent}: the runner before ({who}) is gone, but a run it started has not ended after "
                    f"{orphan_seconds:.0f} s; stop that process (fuser {path}), then start again."
                ) from None
            time.sleep(0.2)
    os.ftruncate(fd, 0)
    record = {"pid": os.getpid(), "host": platform.node(), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    os.pwrite(fd, json.dumps(record).encode(), 0)
    return Lock(path, fd)
