"""The line that a user sees of a log step or an evaluation."""

from __future__ import annotations

import os
import sys

from config.schema import Metrics as MetricsSection

LOSS = "loss_metrics/global_avg_loss"
VALIDATION = "validation_metrics/"

_COLOURS = {"step": 31, "loss": 32, "gnorm": 33, "mem": 36, "tps": 34, "tflops": 36, "mfu": 35, "validation": 33}
"""torchtitan's, as ANSI numbers."""


def console_line(fields: dict[str, str], *, colour: bool) -> str:
    """ "name value" pairs, two spaces apart; with ``colour`` each in its own."""
    parts = []
    for name, value in fields.items():
        part = f"{name} {value}"
        parts.append(f"\033[{_COLOURS[name]}m{part}\033[0m" if colour and name in _COLOURS else part)
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """m:ss, h:mm:ss, or days and h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02}"
    return f"{days}d {hour}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def training_fields(values: dict[str, float]) -> dict[str, str]:
    """Name -> text of what a log step shows of its tags."""
    norm = values["grad_norm"]
    fields = {
        "loss": f"{values[LOSS]:.4f}",
        "gnorm": f"{norm:.1e}" if norm < 0.1 else f"{norm:.2f}",
        "lr": f"{values['lr']:.2e}",
    }
    memory = values.get("memory/max_reserved(GiB)", values.get("memory/max_rss(GiB)"))
    if memory is not None:
        fields["mem"] = f"{memory:.1f}GiB"
    fields["tps"] = f"{values['throughput(tps)']:,.0f}" if "throughput(tps)" in values else "(warm-up)"
    if "tflops" in values:
        fields["tflops"] = f"{values['tflops']:,.1f}" if values["tflops"] >= 10 else f"{values['tflops']:.2g}"
    if "mfu(%)" in values:
        fields["mfu"] = f"{values['mfu(%)']:.1f}%"
    if (filled := values.get("data/fill_rate", 1.0)) < 1:
        fields["filled"] = f"{100 * filled:.1f}%"
    return fields


def validation_fields(values: dict[str, float]) -> dict[str, str]:
    """Name -> text of an evaluation's tags."""
    return {
        tag.removeprefix(VALIDATION).replace("_", " "): f"{value:.4f}" if value < 100 else f"{value:,.0f}"
        for tag, value in values.items()
    }


def may_colour(section: MetricsSection) -> bool:
    """Whether the console is a terminal on which nobody asked for plain text."""
    return sys.stdout.isatty() and not section.disable_color_printing and not os.environ.get("NO_COLOR")
