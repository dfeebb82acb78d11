"""Pipeline parallelism as arithmetic: which modules form which stage, which rank holds it, how long ranks wait.

A pipeline of p ranks has p x v stages, v of them on each rank. An optimizer step is n micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest

from config.keys import shown
from config.schema import Config, Parallelism
from config.shapes import ModelShape

Said = Callable[[str], str]


@dataclass(frozen=True)
class Schedule:
    """What a schedule asks for, and what it costs."""

    stages_per_rank: int | None
    """v. None: 2, or as many as ``pipeline_parallel_layers_per_stage`` or explicit stages ask for."""
    idle: Fraction
    """Idle time of a rank in a step, in forward passes of its layers, is this x (p - 1) / v, where the backward passes
    for inputs and for weights take as long as forward. Communication and unequal stages come on top.
    """
    v_shaped: bool = False
    """The second half of the stages runs over the ranks backwards: the first rank holds the first and the last."""
    splits_backward: bool = False
    """Gradients of weights are computed apart from those of inputs, to fill what would be idle."""


SCHEDULES = {
    "naive": Schedule(1, Fraction(3)),
    "GPipe": Schedule(1, Fraction(3)),  # Huang et al., arXiv 1811.06965
    "1F1B": Schedule(1, Fraction(3)),  # PipeDream-flush; Narayanan et al., arXiv 2104.04473
    "Interleaved1F1B": Schedule(None, Fraction(3)),  # arXiv 2104.04473, section 2.2
    "InterleavedZeroBubble": Schedule(None, Fraction(1), splits_backward=True),  # Qi et al., arXiv 2401.10241
    "ZBVZeroBubble": Schedule(2, Fraction(1), v_shaped=True, splits_backward=True),  # Qi et al., arXiv 2405.15362
    "DualPipeV": Schedule(2, Fraction(1), v_shaped=True, splits_backward=True),  # DeepSeek-V3, arXiv 2412.19437
}
"""Schedules by their name in torchtitan; ``naive`` is the split without a schedule, one micro-batch at a time.

``tests/parallelisms/test_pipeline_schedule.py`` holds the idle times against the order in which torch runs its actions.
"""


def stage_count(section: Parallelism, n_layers: int) -> int:
    """Stages of the whole pipeline. Rules see to it that they share out evenly over the ranks."""
    ranks, schedule = section.pipeline_parallel_degree, SCHEDULES[section.pipeline_parallel_schedule]
    if section.module_fqns_per_model_part:
        return len(section.module_fqns_per_model_part)
    if section.pipeline_parallel_layers_per_stage is not None:
        return -(-_weight(section, n_layers) // section.pipeline_parallel_layers_per_stage)
    return ranks * (schedule.stages_per_rank or 2)


def _weight(section: Parallelism, n_layers: int) -> int:
    """Layers to share out, where embedding and head count as the layers that their stages hold less."""
    return (
        n_layers + section.pipeline_parallel_first_stage_less_layers + section.pipeline_parallel_last_stage_less_layers
    )


def layers_by_stage(section: Parallelism, n_layers: int) -> list[int]:
    """How many layers each stage holds: equal shares, the earlier stages one more where it does not come out even.

    A share below 0 means that the layers do not suffice.
    """
    stages = stage_count(section, n_layers)
    share, more = divmod(_weight(section, n_layers), stages)
    counts = [share + (i < more) for i in range(stages)]
    counts[0] -= section.pipeline_parallel_first_stage_less_layers
    counts[-1] -= section.pipeline_parallel_last_stage_less_layers
    return counts


def model_parts(n_layers: int) -> list[str]:
    """The modules that stages are made of, in the order of the forward pass."""
    return ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]


def stage_modules(section: Parallelism, n_layers: int) -> list[list[str]]:
    """The modules of each stage, in order."""
    if section.module_fqns_per_model_part:
        return section.module_fqns_per_model_part
    parts = iter(model_parts(n_layers))
    stages: list[list[str]] = [[] for _ in range(stage_count(section, n_layers))]
    stages[0].append(next(parts))
    for stage, count in zip(stages, layers_by_stage(section, n_layers), strict=True):
        stage.extend(next(parts) for _ in range(count))
    stages[-1].extend(parts)
    return stages


def stage_ranks(section: Parallelism, stages: int) -> list[int]:
    """The rank along ``pp`` that holds each stage: round after round, or there and back in a V."""
    ranks = section.pipeline_parallel_degree
    if SCHEDULES[section.pipeline_parallel_schedule].v_shaped:
        return [min(i, stages - 1 - i) for i in range(stages)]
    return [i % ranks for i in range(stages)]


def rank_modules(section: Parallelism, n_layers: int) -> list[list[str]]:
    """The modules on each rank along ``pp``."""
    stages = stage_modules(section, n_layers)
    held: list[list[str]] = [[] for _ in range(section.pipeline_parallel_degree)]
    for modules, rank in zip(stages, stage_ranks(section, len(stages)), strict=True):
        held[rank] += modules
    return held


def micro_batches(config: Config, accumulation: int) -> int:
    """Micro-batches that a pipeline runs in an optimizer step, of ``accumulation`` local batches a rank.

    A naive split is given whole local batches, one after the other.
    """
    section = config.parallelism
    if section.pipeline_parallel_schedule == "naive":
        return accumulation
    return accumulation * config.training.local_batch_size // section.pipeline_parallel_microbatch_size


def bubble(section: Parallelism, n_layers: int, n: int) -> float:
    """Predicted share of a step in which a rank waits for others, 0 .. 1, for equal stages and free communication."""
    ranks, schedule = section.pipeline_parallel_degree, SCHEDULES[section.pipeline_parallel_schedule]
    per_rank = Fraction(stage_count(section, n_layers), ranks)
    idle = schedule.idle * (ranks - 1) / per_rank
    if section.pipeline_parallel_schedule == "naive":
        idle *= n
    return float(idle / (3 * n + idle))


def pipeline_rules(
    config: Config, shape: ModelShape, accumulation: int | None, said: Said | None = None
) -> Iterator[str]:
    """What is wrong with the stages and micro-batches of a pipeline, a sentence each.

    What a pipeline cannot be combined with is in config/refused_layouts.py.

    Args:
        accumulation: local batches a rank in a step; None where the number of ranks is not known yet.
        said: a full key with its value, and where it comes from.
    """
    if config.parallelism.pipeline_parallel_degree == 1:
        return

    def plain(full: str) -> str:
        section, name = full.split(".")
        return f"{full} = {shown(getattr(getattr(config, section), name))}"

    said = said or plain
    broken = list(_stage_rules(config.parallelism, shape.n_layers, said))
    if accumulation is not None:
        yield from broken or _micro_batch_rules(config, shape.n_layers, accumulation, said)
        return
    yield from broken
    yield from _size_rules(config, said)


def _stage_rules(section: Parallelism, n_layers: int, said: Said) -> Iterator[str]:
    ranks, explicit = section.pipeline_parallel_degree, section.module_fqns_per_model_part
    degree, schedule = said("parallelism.pipeline_parallel_degree"), said("parallelism.pipeline_parallel_schedule")
    less = [f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")]
    v, stages = SCHEDULES[section.pipeline_parallel_schedule].stages_per_rank, stage_count(section, n_layers)
    if explicit:
        yield from _explicit_rules(explicit, n_layers)
    if stages % ranks or (stages != ranks * v if v else stages == ranks):
        needs = f"{v} on each rank" if v else "2 or more on each rank, equally many"
        if explicit:
            came, advice = "are listed", "List as many stages as the schedule needs."
        else:
            a_stage = said("parallelism.pipeline_parallel_layers_per_stage")
            came = f"come from {n_layers} layers and {a_stage}"
            advice = f"Remove that key, or set it to {-(-_weight(section, n_layers) // (ranks * (v or 2)))}."
        yield f"{schedule} needs stages {needs}, and {stages} {came} for {degree}. {advice}"
    elif not explicit and (
        min(layers_by_stage(section, n_layers)) < 0 or 0 in layers_by_stage(section, n_layers)[1:-1]
    ):
        yield (
            f"{degree} with {schedule} makes {stages} stages of {n_layers} layers,"
            f" {getattr(section, less[0])} less in the first and {getattr(section, less[1])} less in the last:"
            f" they do not suffice. Use fewer ranks or more layers, or set {less[0]} and {less[1]} to 0."
        )


def _explicit_rules(explicit: list[list[str]], n_layers: int) -> Iterator[str]:
    key = "parallelism.module_fqns_per_model_part"
    listed, expected = [module for stage in explicit for module in stage], model_parts(n_layers)
    for found, wanted in zip_longest(listed, expected):
        if found != wanted:
            what = "the end" if found is None else shown(found)
            place = "nothing is left" if wanted is None else f"{shown(wanted)} belongs"
            yield f"{key}: {what} stands where {place}: every module once, in the order of the model."
            break
    if not all(explicit):
        yield f"{key}: a stage is empty."


def _size_rules(config: Config, said: Said) -> Iterator[str]:
    size = config.parallelism.pipeline_parallel_microbatch_size
    if config.parallelism.pipeline_parallel_schedule != "naive" and config.training.local_batch_size % size:
        yield (
            f"{said('training.local_batch_size')} is not divisible by"
            f" {said('parallelism.pipeline_parallel_microbatch_size')}, the sequences of a micro-batch."
        )


def _micro_batch_rules(config: Config, n_layers: int, accumulation: int, said: Said) -> Iterator[str]:
    section = config.parallelism
    schedule, ranks = section.pipeline_parallel_schedule, section.pipeline_parallel_degree
    name, n = said("parallelism.pipeline_parallel_schedule"), micro_batches(config, accumulation)
    v_shaped, rounds = SCHEDULES[schedule].v_shaped, max(1, n // ranks)
    came = (
        f"gradient accumulation({accumulation}) x local_batch_size({config.training.local_batch_size}) /"
        f" pipeline_parallel_microbatch_size({section.pipeline_parallel_microbatch_size}) = {n}"
    )
    least = 1 if schedule in ("naive", "GPipe") else stage_count(section, n_layers) if v_shaped else ranks
    if n < least:
        yield (
            f"{name} needs {least} micro-batches for {ranks} ranks, and {came}. Raise training.global_batch_size or"
            " training.local_batch_size."
        )
    elif SCHEDULES[schedule].stages_per_rank is None and n % rounds:
        yield (
            f"{name} runs {rounds} equal rounds of micro-batches, and {came}. Make it a multiple of"
            f" pipeline_parallel_degree({ranks})."
        )


def reshard_after_forward(config: Config) -> str:
    """ "default", "always" or "never": ``fsdp_reshard_after_forward``, as ``zero_stage`` decides where that is set. A
    pipeline keeps parameters by default: it would gather each block again for each micro-batch.
    """
    section = config.parallelism
    stage, asked = section.zero_stage, section.fsdp_reshard_after_forward
    keeps = asked == "default" and stage is None and section.pipeline_parallel_degree > 1
    return "never" if stage == 2 or keeps else asked
