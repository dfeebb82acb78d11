"""What a user sees of a mistake: the message alone, with nothing created."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.errors import ConfigError


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder`` and what it holds; folders with empty contents."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def refusal(folder: Path, action: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The message of the ConfigError that ``action`` raises; nothing in ``folder`` may have changed."""
    before = tree(folder)
    with pytest.raises(ConfigError) as caught:
        action(*arguments, **keywords)
    assert tree(folder) == before
    return str(caught.value)
