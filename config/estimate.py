"""Peak active memory of a rank, foreseen: a formula on a configuration, without torch and without a device.

The fullest moment of a step on the fullest rank (config/step_memory.py). What is exact (weights, gradients, states:
config/memory.py; the sizes of logits: config/loss.py) is counted as it is; what depends on the compiler and on kernels
(config/saved_tensors.py) is multiplied by a coefficient of config/memory_coefficients.json, which ``python -m
benchmarks.memory_fit`` writes together with where it comes from.

Active memory is what tensors hold. The allocator reserves more, by its fragmentation; the CUDA context comes on top.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.flavors import resolve_shape
from config.pipeline import micro_batches, rank_modules
from config.schema import Config
from config.step_memory import Moment, Rank
from config.world import derived, mesh_degrees

TABLE = Path(__file__).with_name("memory_coefficients.json")
NAMES = ("eager", "compiled", "experts", "casts", "working", "loss")
"""Coefficients. 1 is what was counted, except ``casts``: the share of weights that compiled blocks keep in bfloat16."""


@dataclass(frozen=True)
class Estimate:
    """The moments of the fullest rank."""

    moments: tuple[Moment, ...]
    coefficients: dict[str, float]

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.size(self.coefficients))

    @property
    def peak(self) -> int:
        """Bytes."""
        return round(self.fullest.size(self.coefficients))

    def parts(self) -> dict[str, int]:
        """Name -> bytes at the fullest moment, scaled, without what is not there."""
        found: dict[str, int] = {}
        for part in self.fullest.parts:
            size = round(part.size * self.coefficients.get(part.coefficient, 1.0))
            if size:
                found[part.name] = found.get(part.name, 0) + size
        return found


@functools.cache
def coefficient_table() -> dict[str, Any]:
    """The file: ``coefficients``, ``fitted_on`` (rows; empty where nothing was measured), ``worst_unseen_percent``."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def provenance() -> str:
    """A few words on how far the estimate is to be trusted."""
    table = coefficient_table()
    if not table["fitted_on"]:
        return "unfitted: counted tensor by tensor, never measured"
    return (
        f"fitted on {len(table['fitted_on'])} runs ({table['gpu']}, torch {table['torch']}); off by at most"
        f" {table['worst_unseen_percent']:.1f} % on {len(table['unseen'])} others"
    )


def estimate(config: Config, world_size: int, coefficients: dict[str, float] | None = None) -> Estimate:
    """The peak of the fullest of ``world_size`` ranks. Data are without documents' masks, experts' load is even.

    Args:
        coefficients: None: those of the table.

    Raises:
        ConfigError: as :func:`config.world.derived`.
    """
    numbers, degrees = coefficients or coefficient_table()["coefficients"], mesh_degrees(config, world_size)
    accumulation = derived(config, world_size)["gradient_accumulation_steps"].value
    n_layers = resolve_shape(config.model, config.moe).n_layers
    if degrees["pp"] == 1:
        return Estimate(Rank(config, degrees, None, 1, accumulation > 1).moments(), numbers)
    runs, ranks = micro_batches(config, accumulation), []
    naive = config.parallelism.pipeline_parallel_schedule == "naive"
    for place, modules in enumerate(rank_modules(config.parallelism, n_layers)):
        flying = runs if config.parallelism.pipeline_parallel_schedule == "GPipe" else min(runs, degrees["pp"] - place)
        ranks.append(Estimate(Rank(config, degrees, modules, 1 if naive else flying, runs > 1).moments(), numbers))
    return max(ranks, key=lambda each: each.peak)


def keeps_gathered(config: Config, world_size: int) -> bool:
    """Whether FSDP2 keeps the parameters of a backward pass for the next micro-batch: as
    ``parallelism.fsdp_reshard_after_backward`` says, by default where no rank's peak grows by it.
    """
    asked = config.parallelism.fsdp_reshard_after_backward
    if asked != "default":
        return asked == "never"
    degrees, numbers = mesh_degrees(config, world_size), coefficient_table()["coefficients"]
    if degrees["pp"] > 1:
        return False  # its stages keep parameters and whole gradients themselves
    rank = Rank(config, degrees, None, 1, accumulates=True)
    return rank.gathered_moment().size(numbers) <= Estimate(rank.moments(), numbers).peak
