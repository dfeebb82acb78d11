"""What each figure of a report shows, drawn from report.json's dictionary alone.

An arm has one colour everywhere: the baseline grey, the others from a palette that colour-blind readers can tell
apart. References are dashed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ablation.document import LIMIT
from ablation.statistics import mean

# Each colour is a name for a CSS variable of the page, which has a light and a dark value for it.
INK, RULE, BASELINE, BAND = "#333331", "#dcdcd8", "#767672", "#e9e4d4"
PALETTE = ("#1f77b8", "#d2571b", "#15936b", "#b8569a", "#b78600", "#4a9fc9", "#7a5ac2", "#8c6d4f")
CSS_NAMES = {INK: "ink", RULE: "rule", BASELINE: "baseline", BAND: "band"} | {
    c: f"arm{i}" for i, c in enumerate(PALETTE)
}
SIZE = (4.7, 3.1)  # inches; 340 points, the width of a phone, so that labels are readable there


def colours(result: dict[str, Any]) -> dict[str, str]:
    """Arm label -> colour."""
    arms = result["arms"]
    others = [label for label, arm in arms.items() if arm["role"] != "baseline"]
    return {label: BASELINE for label in arms} | {
        label: PALETTE[i % len(PALETTE)] for i, label in enumerate(others)
    }  # fmt: skip


def _new(height: float = SIZE[1], panels: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(SIZE[0], height))
    return figure, figure.subplots(1, panels)


def _tokens_axis(axes: Any) -> None:
    from matplotlib.ticker import FuncFormatter

    def show(x: float, _: Any) -> str:
        for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
            if abs(x) >= size:
                return f"{x / size:g}{letter}"
        return f"{x:g}"

    axes.xaxis.set_major_formatter(FuncFormatter(show))
    axes.set_xlabel("tokens")


def _forest(result: dict[str, Any], part: str) -> Any:
    """One row an arm: estimate and the interval that decided, over the band. A far reference is written at the edge."""
    rows = [c for c in reversed(result["comparisons"]) if c[part]["value"] is not None]
    if not rows:
        return None
    percent = part == "speed"

    def scaled(value: float) -> float:
        return 100.0 * (value - 1.0) if percent else value

    band = 100.0 * result["decision"]["speed_band"] if percent else result["decision"]["band"]
    low = 100.0 * (1.0 / (1.0 + band / 100.0) - 1.0) if percent else -band
    figure, axes = _new(height=1.05 + 0.42 * len(rows))
    shown = [low, band, 0.0]
    for row in rows:
        if row["role"] == "candidate" or len(rows) == 1:
            ends = [scaled(v) for v in (row[part]["interval"] or [row[part]["value"]])]
            shown += [min(v, LIMIT) for v in ends] if percent else ends  # a longer bar leaves the picture
            shown += [scaled(v) for v in row[part]["per_seed"].values()]
    room = 0.08 * (max(shown) - min(shown)) or 1e-3
    left, right = min(shown) - room, max(shown) + room
    axes.set_xlim(left, right)
    if band:
        axes.axvspan(low, band, color=BAND, linewidth=0)
    axes.axvline(0.0, color=BASELINE, linewidth=1.2)
    for y, row in enumerate(rows):
        colour, value = colours(result)[row["arm"]], scaled(row[part]["value"])
        if not left <= value <= right:
            text = f"{value:+.1f} %" if percent else f"{value:+.3f}"
            if value > right:
                axes.text(right, y, f"{text} \u2192", color=colour, ha="right", va="center", fontsize=9)
            else:
                axes.text(left, y, f"\u2190 {text}", color=colour, ha="left", va="center", fontsize=9)
            continue
        hollow = row["role"] == "reference" or row[part]["word"] == "INVALID"
        if row[part]["interval"]:
            ends = [scaled(v) for v in row[part]["interval"]]
            axes.plot(ends, [y, y], color=colour, linewidth=2, linestyle="--" if hollow else "-", solid_capstyle="butt")
        seeds = [scaled(v) for v in row[part]["per_seed"].values()]
        axes.plot(seeds, [y] * len(seeds), "|", color=colour, markersize=9, markeredgewidth=1)
        axes.plot([value], [y], "o", color=colour, markerfacecolor="none" if hollow else colour, markersize=6.5)
    axes.set_yticks(range(len(rows)), [row["arm"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(visible=False, axis="y")
    metric = _metric_name(result["decision"]["metric"])
    axes.set_xlabel("tokens/s against the baseline, %" if percent else f"{metric}, difference")
    return figure


def _series(arm: dict[str, Any], name: str, axis: str) -> list[tuple[list[float], list[float]]]:
    curves = [curve[name] for curve in arm["curves"].values()]
    return [(curve[axis], curve["values"]) for curve in curves if len(curve.get("values") or []) > 1]


def _average(lines: Sequence[tuple[list[float], list[float]]]) -> tuple[list[float], list[float]]:
    """Mean over seeds at the points that all share by position; seconds are averaged too."""
    length = min(len(x) for x, _ in lines)
    return (
        [mean([x[i] for x, _ in lines]) for i in range(length)],
        [mean([y[i] for _, y in lines]) for i in range(length)],
    )


def _curve_name(result: dict[str, Any]) -> str:
    """The deciding metric where it was measured often enough for a curve, else the training loss."""
    points = [len(c["metric"].get("values") or []) for arm in result["arms"].values() for c in arm["curves"].values()]
    return "metric" if points and min(points) >= 5 else "train"


def _curves(result: dict[str, Any], name: str, axis: str, label: str, *, cut: bool) -> Any:
    shade = colours(result)
    figure, axes = _new()
    visible: list[float] = []
    places: list[float] = []
    for arm_label, arm in result["arms"].items():
        lines = _series(arm, name, axis)
        if not lines:
            continue
        style = "--" if arm["role"] == "reference" else "-"
        for x, y in lines:
            axes.plot(x, y, style, color=shade[arm_label], linewidth=0.7, alpha=0.4)
            start = 0.25 * x[-1] if cut else 0.0
            visible += [value for place, value in zip(x, y, strict=True) if place >= start]
            places += [place for place in x if place >= 0.8 * start]
        x, y = _average(lines)
        axes.plot(x, y, style, color=shade[arm_label], linewidth=2, label=arm_label)
    if not visible:
        return None
    axes.set_xlim(min(places), 1.02 * max(places))
    room = 0.06 * (max(visible) - min(visible)) or 0.01 * abs(max(visible)) or 1.0
    axes.set_ylim(min(visible) - room, max(visible) + room)
    axes.set_ylabel(label)
    if max(visible) >= 10_000:
        axes.yaxis.set_major_formatter("{x:,.0f}")
    if axis == "tokens":
        _tokens_axis(axes)
    else:
        axes.set_xlabel("training seconds")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def _loss(result: dict[str, Any], axis: str) -> Any:
    return _curves(result, _curve_name(result), axis, _loss_label(result), cut=True)


def _loss_label(result: dict[str, Any]) -> str:
    return _metric_name(result["decision"]["metric"]) if _curve_name(result) == "metric" else "training loss"


def _metric_name(tag: str) -> str:
    return {"validation_metrics/loss": "validation loss"}.get(tag, tag)


def shaded(result: dict[str, Any]) -> set[str]:
    """Names of the figures that show a band."""
    decision = result["decision"]
    bands = {"verdict_loss": decision["band"], "verdict_speed": decision["speed_band"]}
    return {name for name, band in (bands | {"loss_difference": _spread(result)}).items() if band}


def _spread(result: dict[str, Any]) -> float:
    """Half the band of the differences: that of seeds of the baseline, which says nothing of the training loss."""
    bands = [aa["loss"]["band"] for aa in result["aa"].values() if aa["loss"]]
    return max(bands, default=0.0) if _curve_name(result) == "metric" else 0.0


def _difference(result: dict[str, Any]) -> Any:
    """Per-seed difference from the baseline over tokens, over ``_spread``."""
    shade = colours(result)
    name = _curve_name(result)
    figure, axes = _new()
    drawn, late, spread = False, [0.0], _spread(result)
    if spread:
        axes.axhspan(-spread, spread, color=BAND, linewidth=0)
    for row in result["comparisons"]:
        base, arm = result["arms"][row["baseline"]], result["arms"][row["arm"]]
        lines = []
        for seed, curve in arm["curves"].items():
            before = base["curves"].get(seed, {}).get(name, {})
            values = dict(zip(before.get("tokens", []), before.get("values", []), strict=True))
            pairs = [
                (x, y - values[x])
                for x, y in zip(curve[name].get("tokens", []), curve[name].get("values", []), strict=True)
                if x in values
            ]
            if len(pairs) > 1:
                lines.append(([x for x, _ in pairs], [d for _, d in pairs]))
        if not lines:
            continue
        drawn = True
        style = "--" if row["role"] == "reference" else "-"
        for x, y in lines:
            axes.plot(x, y, style, color=shade[row["arm"]], linewidth=0.7, alpha=0.4)
            if row["role"] != "reference":
                late += [d for place, d in zip(x, y, strict=True) if place >= 0.1 * x[-1]]
        x, y = _average(lines)
        axes.plot(x, y, style, color=shade[row["arm"]], linewidth=2, label=row["arm"])
    if not drawn:
        return None
    axes.axhline(0.0, color=BASELINE, linewidth=1.2)
    late += [spread, -spread]
    room = 0.08 * (max(late) - min(late)) or 0.001
    axes.set_ylim(min(late) - room, max(late) + room)
    _tokens_axis(axes)
    axes.set_ylabel(f"{_loss_label(result)}, difference")
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _over_variable(result: dict[str, Any]) -> Any:
    """Metric and tokens/s over a numeric variable, mean and seeds."""
    if len(result["variables"]) != 1:
        return None
    key = result["variables"][0]
    arms = [arm for arm in result["arms"].values() if arm["metric"] and arm["rate"] and arm["role"] != "reference"]
    if len(arms) < 3 or not all(_is_number(arm["config"].get(key)) for arm in arms):
        return None
    figure, panels = _new(panels=2)
    arms.sort(key=lambda arm: arm["config"][key])
    xs = [arm["config"][key] for arm in arms]
    for axes, name, label in zip(
        panels, ("metric", "rate"), (result["decision"]["metric"], "tokens/s/device"), strict=True
    ):
        axes.plot(xs, [arm[name]["mean"] for arm in arms], "-o", color=PALETTE[0], linewidth=1.8, markersize=5)
        for x, arm in zip(xs, arms, strict=True):
            values = list(arm[name]["values"].values())
            axes.plot([x] * len(values), values, "_", color=PALETTE[0], markersize=8, alpha=0.7)
        if arms[0][name]["mean"] >= 10_000:
            axes.yaxis.set_major_formatter("{x:,.0f}")
        if min(xs) > 0 and max(xs) / min(xs) >= 8:
            axes.set_xscale("log")
        if len(xs) <= 4:
            axes.set_xticks(xs, [f"{x:g}" for x in xs])
            axes.minorticks_off()
        axes.set_title(_metric_name(label))
        axes.set_xlabel(key.rpartition(".")[2])
    return figure


def _tune(result: dict[str, Any]) -> Any:
    """The metric over a tuned key, one line an arm, the chosen point filled."""
    grids = {label: points for label, points in result["tune"].items() if len(points) > 1}
    keys = {key for points in grids.values() for point in points for key in point["values"]}
    if len(keys) != 1:
        return None
    key = keys.pop()
    figure, axes = _new()
    shade = colours(result)
    for label, points in grids.items():
        known = sorted((p["values"][key], p["mean"], p["best"]) for p in points if p["mean"] is not None)
        if not known or not all(_is_number(x) for x, _, _ in known):
            return None
        colour = shade.get(label, BASELINE)
        axes.plot(
            [x for x, _, _ in known], [y for _, y, _ in known], "-o", color=colour, markerfacecolor="none", label=label
        )
        axes.plot([x for x, _, best in known if best], [y for _, y, best in known if best], "o", color=colour)
        if known[0][0] > 0 and known[-1][0] / known[0][0] >= 8:
            axes.set_xscale("log")
    axes.set_xlabel(key)
    axes.set_ylabel(result["decision"]["metric"])
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def _expert_load(result: dict[str, Any]) -> Any:
    """Layers x experts, load / mean at the end, one panel an arm on one colour scale."""
    grids = {label: arm["expert_load"] for label, arm in result["arms"].items() if arm["expert_load"]}
    if not grids:
        return None
    figure, panels = _new(height=0.9 + 1.5 * len(grids))
    figure.clear()
    panels = figure.subplots(len(grids), 1, squeeze=False)[:, 0]
    top = max(2.0, max(max(row) for grid in grids.values() for row in grid))
    for axes, (label, grid) in zip(panels, grids.items(), strict=True):
        image = axes.imshow(grid, aspect="auto", cmap="cividis", vmin=0.0, vmax=top, interpolation="nearest")
        axes.set_title(label)
        axes.set_ylabel("layer")
        axes.grid(visible=False)
    panels[-1].set_xlabel("expert")
    figure.colorbar(image, ax=list(panels), label="load / mean")
    return figure


DRAWINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "verdict_loss": lambda result: _forest(result, "loss"),
    "verdict_speed": lambda result: _forest(result, "speed"),
    "loss_tokens": lambda result: _loss(result, "tokens"),
    "loss_seconds": lambda result: _loss(result, "seconds"),
    "loss_difference": _difference,
    "throughput": lambda result: _curves(result, "rate", "tokens", "tokens/s/device", cut=False),
    "variable": _over_variable,
    "tune": _tune,
    "expert_load": _expert_load,
}
