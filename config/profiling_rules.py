"""Rules of [profiling]."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from config.errors import ConfigError
from config.keys import shown
from config.refusal import Said
from config.schema import Config

_OTHERS = ("metrics.save_tb_folder", "checkpoint.folder")
_FOLDERS = ("profiling.save_traces_folder", "profiling.save_memory_snapshot_folder")
_TAKEN = ("config.toml", "run.json", "environment.json", "metrics.jsonl", "attempts", "DONE", "FAILED")


def profiling_rules(config: Config, said: Said) -> Iterator[str]:
    """What is wrong with [profiling], a sentence or two each."""
    section = config.profiling
    steps = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and section.profile_freq < steps:
        yield (
            f"{said('profiling.profile_freq')} is shorter than a window: {said('profiling.profiler_warmup')} and"
            f" {said('profiling.profiler_active')} make {steps} steps. Set profile_freq to {steps} or more."
        )
    if any(rank < 0 for rank in section.ranks) or len(set(section.ranks)) < len(section.ranks):
        yield f"{said('profiling.ranks')}: expected ranks from 0, each once, such as [0]; [] means all."
    used = {PurePath(_folder(config, name)): name for name in _OTHERS}
    for name in _FOLDERS:
        folder = PurePath(_folder(config, name))
        if not folder.parts or folder.is_absolute() or ".." in folder.parts or folder.parts[0] in _TAKEN:
            yield f'{said(name)}: expected a folder inside the run directory, such as "profile_traces".'
        elif (other := used.setdefault(folder, name)) != name:
            yield f"{said(name)} is also {other}. Choose another folder."


def profiling_notes(config: Config) -> Iterator[str]:
    """What of [profiling] is allowed and may surprise."""
    section, steps = config.profiling, config.training.steps
    if (section.enable_profiling or section.enable_memory_snapshot) and section.profile_freq > steps:
        yield (
            f"profiling.profile_freq = {section.profile_freq} is beyond training.steps = {steps}: no window is recorded"
        )
    if section.enable_memory_snapshot:
        yield (
            "profiling.enable_memory_snapshot = true: recording allocations slows every step, so none counts for"
            " throughput"
        )


def check_profiled_ranks(config: Config, world_size: int) -> None:
    """ConfigError: a rank of ``profiling.ranks`` does not exist among ``world_size``."""
    section = config.profiling
    beyond = [rank for rank in section.ranks if rank >= world_size]
    if beyond and (section.enable_profiling or section.enable_memory_snapshot):
        raise ConfigError(
            f"profiling.ranks = {shown(config.profiling.ranks)}: there is no rank {beyond[0]} among {world_size}"
            f" (0 to {world_size - 1}). Name those, or set [] for all."
        )


def check_profiling_on(config: Config, device: str) -> None:
    """ConfigError: memory snapshots without a GPU. ``device``: "cpu" or "cuda"."""
    if config.profiling.enable_memory_snapshot and device != "cuda":
        raise ConfigError(
            "profiling.enable_memory_snapshot = true, and this machine has no GPU: what is recorded is the history"
            " of its allocator. Set it to false."
        )


def _folder(config: Config, full: str) -> str:
    section, name = full.split(".")
    return getattr(getattr(config, section), name)
