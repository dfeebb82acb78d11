"""The seeds in force."""

from __future__ import annotations

from config.schema import Config


def seeds(config: Config) -> dict[str, int]:
    """init_seed, data_seed and noise_seed; ``debug.seed`` stands in for those that are not set."""
    section = config.debug
    return {
        name: section.seed if getattr(section, name) is None else getattr(section, name)
        for name in ("init_seed", "data_seed", "noise_seed")
    }
