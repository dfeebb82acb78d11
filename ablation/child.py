"""One run as a child process: its output in a file, and an end that leaves nothing behind, however the runner ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Stopped(Exception):
    """The runner was asked to stop (Ctrl-C, SIGTERM, a closed terminal)."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside the block SIGINT, SIGTERM and SIGHUP raise :class:`Stopped`; a signal ignored before (nohup) stays so."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent(parent: int) -> Callable[[], None]:
    """For the child before exec: have Linux send SIGTERM to it when the runner dies, even by SIGKILL."""

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def run(command: Sequence[str], log: Path, inherit: Sequence[int] = (), grace_seconds: float = 60.0) -> int:
    """Run a command to its end, its output appended to ``log``; returns its exit status (negative: by that signal).

    It has a session of its own, so that Ctrl-C reaches the runner alone, which then stops it with SIGTERM (torchrun
    hands that to its workers) and, should it not end within ``grace_seconds``, kills its whole process group.

    Args:
        inherit: file descriptors the child keeps open (locks).

    Raises:
        Stopped: passed on after the child has ended.
    """
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(inherit),
            preexec_fn=_end_with_parent(os.getpid()),
        )
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(grace_seconds)
            except BaseException:  # too slow, or a second Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            raise


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log that say something."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
