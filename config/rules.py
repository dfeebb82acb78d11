"""Rules between keys."""

from __future__ import annotations

from config.flavors import resolve_shape
from config.schema import Config


def check(config: Config, origins: dict[str, str]) -> None:
    resolve_shape(config.model)


def check_files(config: Config, origins: dict[str, str]) -> None:
    return None
