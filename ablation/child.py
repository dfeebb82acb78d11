"""One run as a child process: its output in a file, and an end that leaves nothing behind, however the runner ends."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
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
    hands that to its workers). Whatever of it has not ended after ``grace_seconds``, its workers included, is killed.

    Args:
        inherit: file descriptors the child keeps open (locks).

    Raises:
        Stopped: passed on after the child has ended.
    """
    before = _children()
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
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
        finally:
            _end_left_behind(before, min(grace_seconds, 10.0))


def _end_left_behind(before: set[int], grace_seconds: float) -> None:
    """End the workers of a launcher that was killed (by the kernel for want of memory, say): torchrun starts each in a
    session of its own, where they go on training beside the next run. Linux hands them to this process, their reaper.

    Args:
        before: children that are no business of the run.
    """
    deadline, asked = time.monotonic() + grace_seconds, set[int]()
    while left := _children() - before:
        for pid in left:
            number = signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM
            if number == signal.SIGKILL or pid not in asked:
                os.kill(pid, number)  # a child that has not been waited for keeps its number
            asked.add(pid)
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.05)


def _children() -> set[int]:
    """Process numbers of this process's children; none where there is no /proc."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log that say something."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
