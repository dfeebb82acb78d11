"""What the GPU allocator holds, for pytorch.org/memory_viz, and what to say when memory has run out."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from trainer.memory import GIB
from trainer.spans import part_of

ENTRIES = 100_000
"""Allocations and frees that are kept, the latest ones; torchtitan's number."""

logger = logging.getLogger(__name__)


def record_allocations() -> None:
    """Keep the history of allocations from now on. CUDA only; every allocation takes longer."""
    # Python's stacks alone: those of C++ take minutes to be looked up when a snapshot is written.
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")


def write_snapshot(folder: Path, rank: int) -> Path:
    """Write what is allocated now, and its history if that is recorded; returns the file. CUDA only."""
    path = folder / f"rank{rank}_memory_snapshot.pickle"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))
    logger.info("Memory snapshot in %s", path)
    return path


def out_of_memory(error: torch.OutOfMemoryError, *, step: int, rank: int, device: torch.device) -> str:
    """One sentence on what was under way and how much memory was in use.

    Args:
        step: the one under way, 0 before the first.
    """
    where = f"in step {step}" if step else "before the first step"
    if part := part_of(error):
        where = f"{where}, {part}"
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    sentence = f"out of memory {where}, on rank {rank}"
    if asked:
        sentence += f": {asked[1]} more were asked for"
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        active, reserved = (stats.get(f"{kind}_bytes.all.peak", 0) / GIB for kind in ("active", "reserved"))
        capacity = torch.cuda.get_device_properties(device).total_memory / GIB
        sentence += f"; peak active {active:.2f} GiB, peak reserved {reserved:.2f} GiB of {capacity:.2f} GiB"
    return sentence
