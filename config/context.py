"""Context parallelism as arithmetic: the pieces that sequences are cut in."""

from __future__ import annotations

from config.schema import Parallelism


def context_layout(section: Parallelism) -> str:
    """ "zigzag" or "contiguous". Ulysses needs the second whatever the key says: its kernel sees whole sequences."""
    return "contiguous" if section.context_parallel_method == "ulysses" else section.context_parallel_layout


def context_pieces(section: Parallelism) -> int:
    """Pieces of equal length that a sequence is cut in."""
    return section.context_parallel_degree * (2 if context_layout(section) == "zigzag" else 1)
