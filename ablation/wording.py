"""The report's sentences: verdict lines for the console, TensorBoard and the first screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ablation.document import DASH, Cell, Number, Numbers, Tone, cell, digits

TONES: dict[str, Tone] = {
    "better": "good", "worse": "bad", "INVALID": "bad", "inconclusive": "warning", "equivalent": "even",
    "reference": "muted",
}  # fmt: skip


def loss_decimals(result: dict[str, Any]) -> int:
    """Decimals that show the narrowest deciding interval: four, more where it is narrower than a thousandth."""
    widths = [
        c["loss"]["interval"][1] - c["loss"]["interval"][0] for c in result["comparisons"] if c["loss"]["interval"]
    ]
    narrow = min((w for w in widths if w > 0), default=1.0)
    return 4 if narrow >= 1e-3 else 5 if narrow >= 1e-4 else 6


def find_metric(comparison: dict[str, Any], name: str) -> int | None:
    """Index of a row of the paired table by its name."""
    return next((i for i, row in enumerate(comparison["metrics"]) if row["name"] == name), None)


def metric_cell(numbers: Numbers, index: int, name: str) -> Cell:
    """Difference or ratio of one metric of comparison ``index``, with its unit; a dash if not measured."""
    row = find_metric(numbers.result["comparisons"][index], name)
    if row is None:
        return cell(DASH, tone="muted")
    entry = numbers.result["comparisons"][index]["metrics"][row]
    path = f"comparisons/{index}/metrics/{row}/value"
    if entry["value"] is not None and entry["kind"] == "ratio":
        return numbers.change(path)
    return numbers.plain(path, 2, sign=True, unit=f" {entry['unit']}")


def memory_cell(numbers: Numbers, index: int) -> Cell:
    """Peak memory of the device, or of the host where there is no other."""
    device = find_metric(numbers.result["comparisons"][index], "peak active memory") is not None
    return metric_cell(numbers, index, "peak active memory" if device else "peak resident memory")


def verdict_cell(part: dict[str, Any]) -> Cell:
    """The verdict in words, toned; reasons of an INVALID one are told elsewhere."""
    return cell(part["phrase"], tone=TONES[part["word"]])


def hardware(result: dict[str, Any], devices: int) -> str:
    """ "8 x NVIDIA H200", as far as recorded."""
    env = result["environment"]
    names = [name for name in env.get("gpu_name", []) if name not in ("null", "")] or env.get("cpu", [])
    return f"{devices} x {' / '.join(names)}" if names else f"{devices} device{'s' if devices > 1 else ''}"


def loss_cell(numbers: Numbers, index: int) -> Cell:
    """Loss difference with the deciding interval."""
    path = f"comparisons/{index}/loss"
    return numbers.with_interval(
        f"{path}/value", f"{path}/interval", ratio=False, decimals=loss_decimals(numbers.result)
    )


def speed_cell(numbers: Numbers, index: int) -> Cell:
    """Tokens a second and device against the baseline, with the deciding interval."""
    path = f"comparisons/{index}/speed"
    return numbers.with_interval(f"{path}/value", f"{path}/interval", ratio=True)


def seed_mark(n: int) -> str:
    """ "5 seeds", or the mark that one seed carries everywhere."""
    return "n = 1" if n == 1 else f"{n} seeds"


def verdict_line(result: dict[str, Any], index: int) -> str:
    """One comparison in a sentence."""
    numbers, c = Numbers(result), result["comparisons"][index]
    parts = [
        f"tokens/s {speed_cell(numbers, index).text}, {c['speed']['phrase']}",
        f"loss {loss_cell(numbers, index).text}, {c['loss']['phrase']}",
    ]
    memory = memory_cell(numbers, index).text
    if memory != DASH:
        parts.append(f"peak memory {memory}")
    n = max(c["loss"]["n"], c["speed"]["n"])
    end = f"{seed_mark(n)}, {hardware(result, c['devices'])}, {c['tier']}"
    return f"{c['arm']} vs {c['baseline']}: {'; '.join(parts)} ({end})"


def validity_cell(items: Sequence[dict[str, Any]], tier: str = "") -> Cell:
    """A validity box in a few words: "paired, valid, 1 warning"."""
    broken = sum(item["status"] in ("INVALID", "unpaired") for item in items)
    warned = sum(item["status"] == "warning" for item in items)
    words = [tier] if tier else []
    words.append(f"{broken} broken" if broken else "valid")
    words += [f"{warned} warning{'s' if warned > 1 else ''}"] if warned else []
    return cell(", ".join(words), tone="bad" if broken else "warning" if warned else "good")


def decision_line(result: dict[str, Any]) -> Cell:
    """What was decided, where and against which band."""
    d = result["decision"]
    level = Number(f"{100 * d['confidence']:.0f}", "decision/confidence", "percent")
    family = f" for the family of {d['family']} arms (Holm)" if d["family"] > 1 else ""
    parts: list[str | Number | Cell] = [
        f"Decided on {d['metric']} at step ", Number(digits(d["step"], 0), "decision/step"), ", ",
        Number(digits(d["tokens"], 0), "decision/tokens"), " tokens. Intervals hold at ", level, f" %{family}. ",
    ]  # fmt: skip
    if d["band"]:
        parts += ["Loss band ±", Number(digits(d["band"]), "decision/band"), f" (from {d['band_source']}). "]
    else:
        parts += ["No loss band: equivalence cannot be claimed. "]
    if d["speed_band"]:
        parts += [
            "Speed band ±",
            Number(digits(100 * d["speed_band"], 2), "decision/speed_band", "percent"),
            " % (from repeats).",
        ]
        if d["speed_noise"] > d["speed_band"]:
            noise = Number(digits(100 * d["speed_noise"], 0), "decision/speed_noise", "percent")
            parts[-1] = cell(" %, the widest that is of use: repeats give ±", noise, " %, the machine was not quiet.")
    else:
        parts += ["No speed band: the baseline was not repeated."]
    return cell(*parts)


def left_nothing_line(result: dict[str, Any]) -> str:
    """The runs that no table shows, because they ended before they had a run directory; empty if there are none."""
    logs = result["left_nothing"]
    return f"Started, and left no run directory: {', '.join(logs)}. They are in no table." if logs else ""


def expectation_line(comparison: dict[str, Any]) -> str:
    """What became of ``expected = "loss-neutral"``; empty if nothing was promised."""
    return {
        "violated": "Violated expectation: loss-neutral was expected, and the loss left the band.",
        "held": "As expected: loss-neutral.",
        "open": "Loss-neutral was expected; these seeds neither show nor refute it.",
    }.get(str(comparison["expectation"]), "")
