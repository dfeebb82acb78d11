"""Keys of [profiling]; names and defaults are torchtitan 0.2.2's, and ``ranks`` is new."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from config.field import key

_TRACES: dict[str, Any] = {"parent": "profiling.enable_profiling", "parent_values": (True,)}


@dataclass
class Profiling:
    enable_profiling: bool = False
    """Record windows of steps: a Chrome trace, a table of kernels and where a step's time goes."""
    save_traces_folder: str = key("profile_traces", **_TRACES)
    """Folder of what a window leaves, inside the run directory."""
    profile_freq: int = key(10, minimum=1)
    """Steps from one window's end to the next one's. A memory snapshot is written there too."""
    profiler_active: int = key(1, minimum=1, **_TRACES)
    """Steps recorded: the last ones of every profile_freq."""
    profiler_warmup: int = key(3, minimum=0, **_TRACES)
    """Steps before these for which the profiler is on and keeps nothing."""
    enable_memory_snapshot: bool = False
    """Record every allocation on the GPU, and write the record every profile_freq steps and when memory runs out."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots, inside the run directory; of what is held when memory runs out, recorded or not."""
    ranks: list[int] = key(factory=lambda: [0])
    """Ranks that record and write. Empty: all of them."""
