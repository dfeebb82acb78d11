"""The one exception a user's mistake becomes."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

_PLACES = {getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "ENOTDIR", "ENAMETOOLONG")}
"""Errors that speak of a place a user chose, not of this program."""


class ConfigError(Exception):
    """A mistake in what the user wrote, found before any device or process group is touched.

    The message is complete: where (file or command line), which key, its value, the rule it breaks and the fix.
    Entry points print it as it is and exit with code 2, without a traceback.
    """


@contextmanager
def places_are_the_users() -> Iterator[None]:
    """Around a command that reads and writes where its user says: a place that refuses is theirs to change.

    Raises:
        ConfigError: in place of an OSError that says so (no right, no room, read-only, below a file). Others pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _PLACES:
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(
            f"{where}{error.strerror}. Choose another folder, or see to the rights and the free space of this one."
        ) from None
