"""Keys of torchtitan 0.2.2 that the schema does not have: which load, which are translated, which are refused and why.

A key leaves this table on the day the schema gains it; a test keeps the two apart.
"""

from __future__ import annotations

from typing import Any


def names() -> list[str]:
    """Every key of this table."""
    return []


def is_known(full: str) -> bool:
    """Whether torchtitan 0.2.2 has this key and the schema does not."""
    return False


def translated(leaves: dict[str, Any], before: dict[str, Any], where: str) -> dict[str, Any]:
    return {}


def judged(foreign: dict[str, Any], origins: dict[str, str], values: dict[str, Any]) -> list[str]:
    return []
