"""How a schema states what a type cannot: the range of a key, and the parent that makes it matter."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def key(
    default: Any = None,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    parent: str = "",
    parent_values: tuple[Any, ...] = (),
    factory: Any = None,
) -> Any:
    """A dataclass field with a range and, for a companion key, the parent that makes it matter.

    ``parent`` is a full key ("compile.enable"); the field matters only while the parent holds one of ``parent_values``.
    """
    metadata = {"minimum": minimum, "maximum": maximum, "parent": parent, "parent_values": parent_values}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)
