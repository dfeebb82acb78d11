"""Numbers of one run: loss at a number of tokens, throughput from step times, memory, cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ablation.held_out import PREFIX
from ablation.runs import TRAIN_LOSS, VALIDATION_LOSS, Run
from ablation.statistics import mean, quantile

FINAL_LINES = 10  # log lines averaged into the final training loss, but never more than the last quarter of a run
SPIKE = 3.0  # a gradient norm this many times its median is a spike

THROUGHPUT = "tokens/s/device"
HIGHER_IS_BETTER = frozenset({"throughput(tps)", "tflops", "mfu(%)", THROUGHPUT})


def lower_is_better(metric: str) -> bool:
    """Whether less of the metric is better. Losses, times and memory: yes. Throughput, TFLOP/s and MFU: no."""
    return metric not in HIGHER_IS_BETTER


def value_at_tokens(run: Run, tag: str, tokens: float) -> float | None:
    """The tag after ``tokens`` tokens: the line at exactly that point, else interpolated between its neighbours.

    None where the run did not get that far. Interpolation happens only between arms with different tokens a step.
    """
    return _interpolate([(step * run.tokens_per_step, value) for step, value in run.series(tag)], tokens)


def _interpolate(points: list[tuple[float, float]], x: float) -> float | None:
    before: tuple[float, float] | None = None
    for point in points:
        if point[0] == x:
            return point[1]
        if point[0] > x:
            if before is None:
                return None
            share = (x - before[0]) / (point[0] - before[0])
            return before[1] + share * (point[1] - before[1])
        before = point
    return None


def training_seconds(run: Run) -> dict[int, float]:
    """Seconds of training up to each timed step. Excluded steps count as the median step: compilation, checkpoints
    and validation are costs of the recipe around the arm, not of the arm."""
    if not run.steady_times:
        return {}
    usual = quantile(run.steady_times, 0.5)
    total, seconds = 0.0, {0: 0.0}
    for step, time in sorted(run.step_times.items()):
        total += time if run.counts(step) else usual
        seconds[step] = total
    return seconds


def seconds_at_tokens(run: Run, tokens: float) -> float | None:
    """Training seconds until ``tokens`` tokens, interpolated within a step; None where the run did not get that far."""
    return _interpolate([(step * run.tokens_per_step, s) for step, s in training_seconds(run).items()], tokens)


def loss_over_seconds(run: Run, tag: str) -> list[tuple[float, float]]:
    """(training seconds, value) of the tag."""
    seconds = training_seconds(run)
    return [(seconds[step], value) for step, value in run.series(tag) if step in seconds]


def value_at_seconds(run: Run, tag: str, seconds: float) -> float | None:
    """The tag after that many training seconds, interpolated; None where the run was over by then."""
    return _interpolate(loss_over_seconds(run, tag), seconds)


def seconds_to_reach(run: Run, tag: str, target: float) -> float | None:
    """Training seconds until the tag first is at or below ``target``, interpolated; None if it never is."""
    before: tuple[float, float] | None = None
    for time, value in loss_over_seconds(run, tag):
        if value <= target:
            if before is None or before[1] == value:
                return time
            return before[0] + (time - before[0]) * (before[1] - target) / (before[1] - value)
        before = (time, value)
    return None


def median_step(run: Run) -> float | None:
    """Median seconds of the steps that count; None if none does."""
    return quantile(run.steady_times, 0.5) if run.steady_times else None


def throughput(run: Run) -> float | None:
    """Unique tokens a second and device, from the median step. Padding takes time and is no token."""
    step = median_step(run)
    return None if step is None else run.fill_rate * run.tokens_per_step / step / run.world_size


def _peak(tag: str) -> Callable[[Run, float], float | None]:
    return lambda run, _: max((value for _, value in run.series(tag)), default=None)


def _at(tag: str) -> Callable[[Run, float], float | None]:
    return lambda run, tokens: value_at_tokens(run, tag, tokens)


def _median(tag: str) -> Callable[[Run, float], float | None]:
    def median(run: Run, _: float) -> float | None:
        start = warmup_end(run)
        values = [value for step, value in run.series(tag) if step > start and math.isfinite(value)]
        return quantile(values, 0.5) if values else None

    return median


def warmup_end(run: Run) -> int:
    """Last step of the unbroken row of excluded steps at the start (compilation and warm-up); 0 if there is none."""
    step = 0
    while step + 1 in run.excluded_steps:
        step += 1
    return step


def _final_train_loss(run: Run, tokens: float) -> float | None:
    values = [v for step, v in run.series(TRAIN_LOSS) if step * run.tokens_per_step <= tokens]
    return mean(values[-max(1, min(FINAL_LINES, len(values) // 4)) :]) if values else None


def _excluded_seconds(run: Run, _: float) -> float | None:
    usual = median_step(run)
    if usual is None:
        return None
    warmup = range(1, warmup_end(run) + 1)
    return math.fsum(max(0.0, run.step_times[step] - usual) for step in warmup if step in run.step_times)


def _spikes(run: Run, _: float) -> float | None:
    norms = [value for _, value in run.series("grad_norm")]
    return float(sum(v > SPIKE * quantile(norms, 0.5) for v in norms)) if norms else None


def _gpu_seconds_a_million(run: Run, _: float) -> float | None:
    rate = throughput(run)
    return None if rate is None else 1e6 / rate


def _device_hours(run: Run, tokens: float) -> float | None:
    seconds = seconds_at_tokens(run, tokens)
    return seconds * run.world_size / 3600.0 if seconds else None


@dataclass(frozen=True)
class Measure:
    """A row of the paired table. ``value(run, tokens)`` is the number of one run at the decision point, or None.

    ``ratio``: compared as a ratio per pair (times, rates, memory), else as a difference.
    """

    name: str
    unit: str
    ratio: bool
    value: Callable[[Run, float], float | None]
    note: str = ""


def held_out_measures(runs: Sequence[Run]) -> list[Measure]:
    """A row for every metric of a held-out task that some run was evaluated on."""
    tags = sorted({tag for run in runs for tag in run.evaluations})
    return [Measure(tag.removeprefix(PREFIX), "", False, _at(tag), "held-out task (lm-eval)") for tag in tags]


def padding_measures(runs: Sequence[Run]) -> list[Measure]:
    """A row for the share of positions that are no padding, if some run was padded."""
    padded = any(run.fill_rate < 1 for run in runs)
    note = "of all positions, those that hold a token of a document"
    return [Measure("fill rate", "share", False, lambda run, _: run.fill_rate, note)] if padded else []


MEASURES = (
    Measure("validation loss", "nats/token", False, _at(VALIDATION_LOSS), "held-out tokens, the same every time"),
    Measure("bits per byte", "bits", False, _at("validation_metrics/bits_per_byte")),
    Measure(
        "final training loss", "nats/token", False, _final_train_loss, f"last quarter, at most {FINAL_LINES} log lines"
    ),
    Measure(THROUGHPUT, "tokens/s", True, lambda run, _: throughput(run), "from the median step"),
    Measure("step time p50", "s", True, lambda run, _: median_step(run)),
    Measure("step time p95", "s", True, lambda run, _: quantile(run.steady_times, 0.95) if run.steady_times else None),
    Measure("MFU", "%", True, _median("mfu(%)"), "of the device's peak, as logged"),
    Measure("TFLOP/s", "TFLOP/s", True, _median("tflops"), "as logged"),
    Measure("peak active memory", "GiB", False, _peak("memory/max_active(GiB)")),
    Measure("peak resident memory", "GiB", False, _peak("memory/max_rss(GiB)"), "of the host"),
    Measure("peak reserved memory", "GiB", False, _peak("memory/max_reserved(GiB)")),
    Measure("exposed communication", "% of step", False, _median("comm/exposed(%)"), "profiled steps only"),
    Measure("total communication", "% of step", False, _median("comm/total(%)"), "profiled steps only"),
    Measure("expert load, max violation", "", False, _median("moe/max_violation"), "(max - mean) / mean, worst layer"),
    Measure("experts without a token", "experts", False, _median("moe/dead_experts"), "all layers"),
    Measure("dropped assignments", "share", False, _median("moe/dropped")),
    Measure("waiting for data", "% of step", False, _median("time_metrics/data_loading(%)")),
    Measure("compile and warm-up", "s", False, _excluded_seconds, "reported, not part of any rate"),
    Measure("gradient-norm spikes", "lines", False, _spikes, f"log lines above {SPIKE:g} times the median"),
    Measure("device time a million tokens", "device-s", True, _gpu_seconds_a_million),
    Measure(
        "device-hours", "device-h", True, _device_hours, "to the decision, without compilation, checkpoints, validation"
    ),
)
