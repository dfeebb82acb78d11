"""What a refused layout is, and the questions that the lists of them ask of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from config.pipeline import SCHEDULES
from config.schema import Config
from config.shapes import ModelShape

Said = Callable[[str], str]
Finds = Callable[[Config, ModelShape, Said], str]
"""(configuration, shape, how to quote a key) -> what is wrong, with the numbers, as the start of a sentence that
:attr:`Refusal.reason` continues; empty where the layout is another one.
"""


@dataclass(frozen=True)
class Refusal:
    """A layout, why it cannot be and the way out, and how to recognise it."""

    layout: str
    reason: str
    finds: Finds


def together(condition: Callable[[Config, ModelShape], bool], *keys: str) -> Finds:
    """Quote ``keys`` where ``condition`` holds."""

    def finds(config: Config, shape: ModelShape, said: Said) -> str:
        return " with ".join(said(f"parallelism.{k}" if "." not in k else k) for k in keys) * condition(config, shape)

    return finds


def does_not_divide(key: str, size: Callable[[Config, ModelShape], int]) -> Finds:
    """Quote ``key`` where ``size`` is not a multiple of the tensor-parallel degree."""

    def finds(config: Config, shape: ModelShape, said: Said) -> str:
        n = config.parallelism.tensor_parallel_degree
        if size(config, shape) % n == 0:
            return ""
        return f"{said(key)} is not divisible by {said('parallelism.tensor_parallel_degree')}"

    return finds


def without_fsdp2(config: Config) -> bool:
    """Whether it is certain, for any number of ranks, that FSDP2 holds nothing."""
    section = config.parallelism
    degree = 1 if section.zero_stage in (0, 1) else section.data_parallel_shard_degree
    return section.fsdp_version == 1 or (degree == 1 and section.tensor_parallel_degree == 1)


def compiles(config: Config, component: str) -> bool:
    """Whether torch.compile takes ``component``: "model" (its blocks), "loss" or "optimizer"."""
    return config.compile.enable and component in config.compile.components


def compares_operators(config: Config) -> bool:
    """Whether a recomputed block must run the operators of its forward pass and no others (torch's selective
    checkpointing by operator): what gathers parameters inside it counts as one.
    """
    section = config.activation_checkpoint
    return section.mode == "selective" and section.selective_ac_option == "op"


def compiled(config: Config) -> bool:
    """Whether inductor compiles the blocks."""
    return compiles(config, "model") and config.compile.backend == "inductor"


def tensor_parallel(config: Config) -> bool:
    """Whether ranks share matrices."""
    return config.parallelism.tensor_parallel_degree > 1


def pipelined(config: Config) -> bool:
    """Whether ranks hold different layers."""
    return config.parallelism.pipeline_parallel_degree > 1


def zero_bubble(config: Config) -> bool:
    """Whether the schedule computes gradients of inputs and of weights apart."""
    return pipelined(config) and SCHEDULES[config.parallelism.pipeline_parallel_schedule].splits_backward
