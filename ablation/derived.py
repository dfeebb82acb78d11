"""Quantities that follow from the configuration and the number of processes: what else moves when the variable does."""

from __future__ import annotations

from typing import Any

from config import world
from config.schema import Config

QUANTITIES = (
    "data_parallel_degree",
    "gradient_accumulation_steps",
    "global_batch_size",
    "tokens_per_step",
    "tokens",
    "warmup_tokens",
    "micro_batch_tokens",
    "validation_tokens",
)
"""Names that ``hold`` may promise to keep equal."""


def derived(config: Config, world_size: int) -> dict[str, Any]:
    """Quantity -> value for a run of ``world_size`` processes: QUANTITIES, and the degree of each mesh axis.

    ``tokens`` are a whole run's, ``micro_batch_tokens`` one process's; ``validation_tokens`` is None where every
    held-out token is read, whatever the mesh.

    Raises:
        ConfigError: the configuration does not fit that many processes.
    """
    numbers = {name: number.value for name, number in world.derived(config, world_size).items()}
    training, validation, degree = config.training, config.validation, numbers["data_parallel_degree"]
    counted = validation.enable and validation.steps != -1
    sequences = validation.steps * validation.local_batch_size * degree
    return {
        **{name: numbers[name] for name in QUANTITIES if name in numbers},
        "warmup_tokens": numbers["tokens_per_step"] * config.lr_scheduler.warmup_steps,
        "micro_batch_tokens": training.local_batch_size * training.seq_len,
        "validation_tokens": sequences * training.seq_len if counted else None,
        **{f"mesh.{axis}": n for axis, n in world.mesh_degrees(config, world_size).items()},
    }
