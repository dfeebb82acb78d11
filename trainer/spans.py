"""Named parts of training: ranges in a profiler's trace, and where in a step an exception came from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.profiler import record_function

PREFIX = "train/"
FORWARD, BACKWARD, OPTIMIZER, DATA = "forward", "backward", "optimizer", "data"
VALIDATION, CHECKPOINT, WINDOW = "validation", "checkpoint", "window"
_watchers: list[Callable[[str], None]] = []
_NOTE = "in the part of training called "


class span:  # noqa: N801 - a context manager, used like a function
    """Context of a part of training. ``detail`` follows the name in a trace ("stage 1 micro-batch 3").

    Without a profiler that records, entering costs one flag's look. An exception that passes through carries the name
    of the innermost part along (:func:`part_of`).
    """

    __slots__ = ("name", "detail", "_range")

    def __init__(self, name: str, detail: str = ""):
        self.name, self.detail = name, detail
        self._range: Any = None

    def __enter__(self) -> None:
        if torch.autograd._profiler_enabled():
            self._range = record_function(f"{PREFIX}{self.name} {self.detail}".rstrip())
            self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._range is not None:
            self._range.__exit__(kind, error, trace)
        if error is None:
            for watcher in _watchers:
                watcher(self.name)
        if error is not None and not part_of(error):
            error.add_note(_NOTE + self.name)


@contextlib.contextmanager
def watch_spans(watcher: Callable[[str], None]) -> Iterator[None]:
    """Within it, ``watcher`` is called at the end of every part that ended well, with its name."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def part_of(error: BaseException) -> str:
    """The innermost part that ``error`` was raised in, or nothing."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith(_NOTE)]
    return notes[0].removeprefix(_NOTE) if notes else ""
