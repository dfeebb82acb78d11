"""Keys of [activation_checkpoint]: what of a forward pass is kept for the backward pass, and where.

Conventions as in config/schema.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.field import key


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective", "experts", "memory_budget", "nested"] = "none"
    """Recompute: full every block; experts all but them; memory_budget as it compiles; nested twice (a mistake)."""
    selective_ac_option: str = key("2", parent="activation_checkpoint.mode", parent_values=("selective",))
    """A number n: recompute every n-th block whole. "op": keep costly operators, recompute the rest."""
    memory_budget: float = key(
        0.5, minimum=0.0, maximum=1.0, parent="activation_checkpoint.mode", parent_values=("memory_budget",)
    )
    """Share of the activations a compiled block may keep: 1 what is fastest, 0 its inputs alone."""
    offload: bool = False
    """Keep in CPU memory, until the backward pass, what blocks save: with mode "full" only their inputs."""
