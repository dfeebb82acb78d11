"""Learning rate of a step: linear warm-up, a stable phase, then a decay. The values are torchtitan 0.2.2's."""

from __future__ import annotations

import math

import torch

from config.schema import LRScheduler


def learning_rate_factor(step: int, section: LRScheduler, steps: int) -> float:
    """The share of optimizer.lr that step ``step`` (the first is 0) is taken with.

    ``steps`` is training.steps, the length of the schedule unless ``section.total_steps`` is set. Warm-up is (step +
    1) / warmup_steps, so the first step already moves; the decay reaches its end one step after the last, so the last
    step still does. Past the end of the schedule the rate stays at ``section.min_lr_factor``. A warm-up or decay that
    does not fit is shortened, as in torchtitan.
    """
    total = section.total_steps or steps
    warmup = min(section.warmup_steps, total)
    decay = total - warmup
    if section.decay_ratio is not None:
        decay = min(round(total * section.decay_ratio), decay)
    decay_start = total - decay

    if step < warmup:
        return (step + 1) / warmup
    if step <= decay_start:
        return 1.0
    progress = min((step - decay_start) / decay, 1.0) if decay else 1.0
    if section.decay_type == "linear":
        remaining = 1.0 - progress
    elif section.decay_type == "sqrt":
        remaining = 1.0 - math.sqrt(progress)
    else:
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return section.min_lr_factor + (1.0 - section.min_lr_factor) * remaining


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, peak: float, section: LRScheduler, steps: int
) -> float:
    """Give every parameter group the rate of step ``step`` (the first is 0) and return it: logged is used.

    Called before each update. The rate is a function of the step alone, so nothing about it is kept in a checkpoint
    and a restored optimizer cannot disagree with its schedule.
    """
    rate = peak * learning_rate_factor(step, section, steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate
