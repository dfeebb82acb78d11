"""The report as data: blocks that report_markdown.py and report_html.py render alike.

A number in a cell remembers its path in report.json, so that the HTML says where each figure comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Tone = Literal["", "good", "bad", "warning", "muted", "even"]
DASH = "\u2013"
MINUS = "\u2212"
LIMIT = 1000.0
"""Per cent. The end of an interval beyond it says that there is no end: two seeds of noisy runs give 1e12."""


@dataclass(frozen=True)
class Number:
    """A formatted number. ``kind`` says how it follows from report.json's value at ``path``: "plain" is the value
    itself, "change" is 100 (value - 1), "percent" is 100 value.
    """

    text: str
    path: str
    kind: str = "plain"


@dataclass(frozen=True)
class Cell:
    """Text and numbers in a row."""

    parts: tuple[str | Number, ...]
    tone: Tone = ""

    @property
    def text(self) -> str:
        """The cell without its paths."""
        return "".join(part if isinstance(part, str) else part.text for part in self.parts)


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Card:
    """The first screen's summary of one arm: its two verdicts, then labelled facts."""

    arm: str
    badges: Sequence[tuple[str, Cell]]
    facts: Sequence[tuple[str, Cell]]
    notes: Sequence[Text] = ()


@dataclass(frozen=True)
class Cards:
    cards: Sequence[Card]


@dataclass(frozen=True)
class Pictures:
    """Figures side by side where there is room: (name, caption)."""

    names: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    text: str


@dataclass(frozen=True)
class Folded:
    """Blocks that HTML shows on demand, or at once if ``open``."""

    summary: str
    blocks: Sequence[Block]
    open: bool = False


Block = Heading | Text | Table | Cards | Pictures | Code | Folded


def cell(*parts: str | Number | Cell, tone: Tone = "") -> Cell:
    """A cell of text, numbers and other cells."""
    flat: list[str | Number] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, Cell) else [part])
    return Cell(tuple(flat), tone)


def lookup(result: Any, path: str) -> Any:
    """The value at a path of report.json: keys and list indices joined by "/"."""
    for step in path.split("/"):
        result = result[int(step)] if isinstance(result, list) else result[step]
    return result


def digits(value: float, decimals: int | None = None, *, sign: bool = False) -> str:
    """A number for people: fixed decimals, or four significant digits with thousands apart. A true minus sign."""
    if decimals is None:
        size = abs(value)
        decimals = 0 if size >= 1000 or float(value).is_integer() else 1 if size >= 100 else 2 if size >= 10 else 3
        if 0 < size < 0.1:
            return f"{value:{'+' if sign else ''}.3g}".replace("-", MINUS)
    text = f"{value:{'+' if sign else ''},.{decimals}f}"
    if not any(c in text for c in "123456789"):
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


@dataclass(frozen=True)
class Numbers:
    """Makes cells out of report.json's numbers."""

    result: dict[str, Any]

    def plain(self, path: str, decimals: int | None = None, *, sign: bool = False, unit: str = "") -> Cell:
        """The number itself; a dash where it is missing."""
        value = lookup(self.result, path)
        if value is None:
            return cell(DASH, tone="muted")
        return cell(Number(digits(value, decimals, sign=sign), path), unit)

    def change(self, path: str) -> Cell:
        """A ratio as a change in per cent: 0.97 is "-3.0 %"."""
        value = lookup(self.result, path)
        if value is None:
            return cell(DASH, tone="muted")
        change = 100.0 * (value - 1.0)
        return cell(Number(digits(change, _percent_decimals(change), sign=True), path, "change"), " %")

    def with_interval(self, path: str, interval: str, *, ratio: bool, decimals: int | None = None) -> Cell:
        """A difference or ratio, and its interval in brackets."""
        value, ends = lookup(self.result, path), lookup(self.result, interval)
        if value is None:
            return cell(DASH, tone="muted")
        if ratio:
            change = 100.0 * (value - 1.0)
            places = _percent_decimals(change)
            head = cell(Number(digits(change, places, sign=True), path, "change"), " %")
            if not ends:
                return cell(head, " [no interval]")
            shown: list[str | Number] = [
                Number(digits(100 * (v - 1), places, sign=True), f"{interval}/{i}", "change")
                if 100 * (v - 1) <= LIMIT
                else f"> {digits(LIMIT, 0, sign=True)}"
                for i, v in enumerate(ends)
            ]
        else:
            if ends and decimals is None and ends[1] > ends[0]:
                decimals = decimals_of_spread((ends[1] - ends[0]) / 2.0)
            head = cell(Number(digits(value, decimals, sign=True), path))
            if not ends:
                return cell(head, " [no interval]")
            shown = [Number(digits(v, decimals, sign=True), f"{interval}/{i}") for i, v in enumerate(ends)]
        return cell(head, " [", shown[0], ", ", shown[1], "]")


def decimals_of_spread(spread: float) -> int:
    """Decimals that show two digits of a positive spread: all that mean anything beside it."""
    return max(0, 1 - math.floor(math.log10(spread)))


def _percent_decimals(change: float) -> int:
    return 1 if abs(change) >= 1 else 2
