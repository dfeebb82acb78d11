"""Figures of a report, each as SVG (for the page, in its colours) and PNG. Needs matplotlib, the ``report`` extra."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

from ablation.drawings import CSS_NAMES, DRAWINGS, INK, RULE


@dataclass(frozen=True)
class Figure:
    """One drawing. ``svg`` has CSS variables for colours."""

    name: str
    svg: str
    png: bytes


def draw_all(result: dict[str, Any]) -> dict[str, Figure]:
    """Every figure that the result has numbers for, by name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "report", "figure.constrained_layout.use": True,
        "font.size": 9.5, "legend.fontsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9, "axes.titlesize": 10,
        "axes.edgecolor": RULE, "axes.labelcolor": INK, "axes.titlecolor": INK, "text.color": INK, "xtick.color": INK,
        "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": RULE,
        "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "axes.titlelocation": "left",
        "xtick.major.size": 0, "ytick.major.size": 0,
    }  # fmt: skip
    figures = {}
    with matplotlib.rc_context(style):
        for name, draw in DRAWINGS.items():
            drawn = draw(result)
            if drawn is not None:
                figures[name] = _finish(name, drawn)
    return figures


def _finish(name: str, figure: Any) -> Figure:
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=180, facecolor="white")
    figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    text = svg.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for colour, variable in CSS_NAMES.items():
        text = text.replace(colour, f"var(--{variable})")
    return Figure(name, text, png.getvalue())
