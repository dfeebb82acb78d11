"""What is seen of a run: a console line, metrics.jsonl and TensorBoard, all from one dictionary a log step.

Tags are torchtitan's, plus ``lr``, validation and the true utilisation. Differences in meaning, on purpose:

* throughput(tps), tflops, mfu(%) and time_metrics/end_to_end(s) come from step times alone, without excluded steps
  (trainer/step_timer.py). A window in which every step is excluded has none of them.
* throughput counts each token of the global batch once, divided by the number of devices, and padding not at all: it,
  tflops and mfu(%) are those of tokens of documents. data/fill_rate is their share of the positions since the
  last log line. ``tokens`` counts positions.
* tflops and mfu(%) use torchtitan's formula, to compare; tflops_causal and mfu_causal(%) count what a causal model with
  its head really multiplies.

A line of metrics.jsonl is JSON as Python's ``json`` writes and reads it: a loss that is not finite is ``NaN``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import torch

import titan
from config.arithmetic import Flops
from config.schema import Config
from trainer.console import LOSS, console_line, duration, may_colour, training_fields, validation_fields
from trainer.memory import PeakMemory
from trainer.run_directory import RunDirectory
from trainer.step_timer import StepTimes

_NO_TAG = ("step", "tokens", "wall_s", "step_times_s", "excluded_steps")

logger = logging.getLogger(__name__)


class Metrics:
    """Writes the metrics of a run. Made on every rank, before training starts; a rank without ``run`` writes nothing.

    Args:
        run: the open run directory, on the one rank that writes.
        device: of this rank.
        world_size: number of ranks, for figures per device.
        tokens_per_step: tokens of a global batch, each counted once.
        flops: operations a token takes.
    """

    def __init__(
        self,
        run: RunDirectory | None,
        config: Config,
        *,
        device: torch.device,
        world_size: int,
        tokens_per_step: int,
        flops: Flops,
    ):
        self._run = run
        self._config = config
        self._tokens_per_step = tokens_per_step
        self._world_size = world_size
        self._flops = flops
        self._peak = titan.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._memory = PeakMemory(device)
        self._begun = time.perf_counter()
        self._first_log: tuple[int, float] | None = None
        self._formula_doubted = False
        self._file = None
        self._tensorboard = None
        if run is not None:
            self._file = open(run.path / "metrics.jsonl", "a", buffering=1, encoding="utf-8")
            if config.metrics.enable_tensorboard:
                self._tensorboard = titan.TensorBoardLogger(str(run.path / config.metrics.save_tb_folder))
                for name, text in _texts(run).items():
                    self._tensorboard.writer.add_text(name, text)

    def carry_over(self, step: int) -> None:
        """Begin with what earlier attempts wrote up to ``step``, where a run goes on from its checkpoint.

        The clock of ``wall_s`` goes on from the last of these lines.
        """
        if self._run is None:
            return
        lines = self._run.earlier_metrics(step)
        for line in lines:
            self._emit(line)
        if lines:
            self._begun = time.perf_counter() - lines[-1]["wall_s"]

    def should_log(self, step: int) -> bool:
        """Whether step ``step`` (the first is 1) is a log step: the first, every log_freq-th, the last."""
        return step in (1, self._config.training.steps) or step % self._config.metrics.log_freq == 0

    def watching_memory(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Around a step: if it is logged, or the run profiled, the peak memory of its parts is kept for that line."""
        watched = self.should_log(step) or self._config.profiling.enable_profiling
        return self._memory.by_part() if watched else contextlib.nullcontext()

    def log(
        self,
        step: int,
        *,
        loss: float,
        max_loss: float,
        grad_norm: float,
        lr: float,
        times: StepTimes,
        validation: dict[str, float] | None = None,
        extra: dict[str, float] | None = None,
        fill_rates: Sequence[float] | None = None,
    ) -> None:
        """Write a log step.

        Args:
            step: the first is 1.
            loss: mean over the valid tokens of the step's global batch, in nats.
            max_loss: the largest mean over one rank's tokens.
            grad_norm: before clipping.
            lr: the rate this step was taken with.
            times: of the steps since the last log step.
            validation: tags of an evaluation after this step.
            extra: further tags.
            fill_rates: of the steps of ``times``, in order: share of positions that are no padding. None: all are 1.

        Raises:
            RuntimeError: the throughput is above what the device can do, so it was measured wrongly.
        """
        values = {LOSS: loss, "loss_metrics/global_max_loss": max_loss, "grad_norm": grad_norm, "lr": lr}
        rates = [1.0] * len(times.seconds) if fill_rates is None else list(fill_rates)
        values |= self._speed(times, rates)
        if rates:
            values["data/fill_rate"] = sum(rates) / len(rates)
        values |= self._memory.collect()
        values |= {**(validation or {}), **(extra or {})}
        self._write(
            step,
            values,
            step_times_s=times.seconds,
            excluded_steps=sorted(times.excluded),
        )
        self._print("step", step, training_fields(values), eta=self._seconds_left(step, times))
        if validation:
            self._print("validation", step, validation_fields(validation))

    @property
    def writer(self) -> Any | None:
        """TensorBoard's SummaryWriter, for pictures; None on a rank that writes none."""
        return None if self._tensorboard is None else self._tensorboard.writer

    def log_validation(self, step: int, values: dict[str, float]) -> None:
        """Write an evaluation where no log step is, such as step 0."""
        self._write(step, values)
        self._print("validation", step, validation_fields(values))

    def close(self) -> None:
        """Close the files. Every line was flushed when it was written."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _speed(self, times: StepTimes, fill_rates: list[float]) -> dict[str, float]:
        values: dict[str, float] = {}
        if times.seconds:
            values["time_metrics/data_loading(s)"] = times.data_wait_s / len(times.seconds)
            values["time_metrics/data_loading(%)"] = 100 * times.data_wait_s / sum(times.seconds)
        counted = times.counted
        if not counted:
            return values
        step_s = sum(counted) / len(counted)
        steps = enumerate(fill_rates, times.first_step)
        filled = sum(rate for step, rate in steps if step not in times.excluded) / len(counted)
        tps = filled * self._tokens_per_step / self._world_size / step_s
        values |= {"time_metrics/end_to_end(s)": step_s, "throughput(tps)": tps}
        for suffix, flops in (("", self._flops.torchtitan), ("_causal", self._flops.causal_with_head)):
            achieved = flops * tps
            if self._peak is not None and achieved > self._peak:
                self._refuse(achieved, tps, causal=suffix != "")
                continue
            values[f"tflops{suffix}"] = achieved / 1e12
            if self._peak is not None:
                values[f"mfu{suffix}(%)"] = 100 * achieved / self._peak
        return values

    def _refuse(self, achieved: float, tps: float, *, causal: bool) -> None:
        """A figure above the peak is not reported: an error if its operations are all done, else the count is off."""
        figures = f"{achieved / 1e12:,.1f} TFLOP/s a device is above its peak of {(self._peak or 0) / 1e12:,.1f}"
        if causal and not self._config.data.document_mask:
            raise RuntimeError(
                f"{figures} ({tps:,.0f} tokens/s a device). The time or the number of tokens is measured wrongly, and "
                "nothing computed from them is worth reporting."
            )
        if not self._formula_doubted:
            why = "it counts attention between documents" if causal else "torchtitan's formula counts masked attention"
            logger.warning("%s: %s. Left out.", figures, why)
            self._formula_doubted = True

    def _write(self, step: int, values: dict[str, float], **lists: list[Any]) -> None:
        if self._file is None:
            return
        place = {"step": step, "tokens": step * self._tokens_per_step, "wall_s": time.perf_counter() - self._begun}
        self._emit({**place, **values, **lists})

    def _emit(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl, and its tags to TensorBoard."""
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")
        if self._tensorboard is not None:
            tags = {tag: value for tag, value in line.items() if tag not in _NO_TAG}
            self._tensorboard.log(tags, line["step"])
            self._tensorboard.writer.flush()

    def _seconds_left(self, step: int, times: StepTimes) -> float | None:
        """At the pace since the first log line, everything included; before a second one, at the pace of the steps."""
        now = time.perf_counter()
        pace = math.nan
        if self._first_log is None:
            self._first_log = (step, now)
            window = times.counted or times.seconds
            if window:
                pace = sum(window) / len(window)
        elif step > self._first_log[0]:
            pace = (now - self._first_log[1]) / (step - self._first_log[0])
        left = (self._config.training.steps - step) * pace
        return None if math.isnan(left) else left

    def _print(self, kind: str, step: int, fields: dict[str, str], eta: float | None = None) -> None:
        if self._file is None:
            return
        steps = self._config.training.steps
        line = {kind: f"{step:{len(str(steps))}}/{steps} {100 * step // steps:3}%", **fields}
        if eta is not None:
            line["eta"] = duration(eta)
        print(console_line(line, colour=may_colour(self._config.metrics)), flush=True)


def _texts(run: RunDirectory) -> dict[str, str]:
    """What TensorBoard's text tab shows: the record of the run, as it lies in its directory."""
    base_diff = {key: f"{values[0]} -> {values[1]}" for key, values in run.record.get("base_diff", {}).items()}
    return {
        "config": _block((run.path / "config.toml").read_text(encoding="utf-8")),
        "difference_from_base": _block("\n".join(f"{key}: {change}" for key, change in base_diff.items()) or "none"),
        "environment": _block((run.path / "environment.json").read_text(encoding="utf-8")),
    }


def _block(text: str) -> str:
    """A Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())
