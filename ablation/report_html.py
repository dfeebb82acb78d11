"""Blocks as one HTML file that needs nothing else: style, figures and numbers are inside. Light and dark, wide and
narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ablation.document import Block, Card, Cards, Cell, Code, Folded, Heading, Number, Pictures, Table, Text
from ablation.drawings import CSS_NAMES

# The palette of drawings.py on a dark page: the same hues, lighter.
DARK = {
    "ink": "#d8d8d4", "rule": "#3a3a38", "baseline": "#9a9a95", "band": "#3d3a2e", "arm0": "#5aa9e0", "arm1": "#ef8354",
    "arm2": "#3fc296", "arm3": "#da86c3", "arm4": "#dbad33", "arm5": "#7cc4e6", "arm6": "#a68ee6", "arm7": "#bb9c7c",
}  # fmt: skip


def _style() -> str:
    light = "; ".join(f"--{name}: {colour}" for colour, name in CSS_NAMES.items())
    dark = "; ".join(f"--{name}: {colour}" for name, colour in DARK.items())
    sheet = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{sheet}"


def render_html(title: str, blocks: Sequence[Block], svgs: Mapping[str, str], marks: Mapping[str, str]) -> str:
    """The page. ``svgs``: drawings by name; ``marks``: CSS colour of each arm."""
    body = "\n".join(_block(block, svgs, marks) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_style()}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _tone(tone: str) -> str:
    return f' class="{tone}"' if tone else ""


def _parts(cell: Cell) -> str:
    return "".join(
        f'<data value="{escape(part.path)}" data-kind="{part.kind}">{escape(part.text)}</data>'
        if isinstance(part, Number)
        else escape(part)
        for part in cell.parts
    )


def _block(block: Block, svgs: Mapping[str, str], marks: Mapping[str, str]) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{escape(text)}</h{level}>"
        case Text(text, tone):
            return f"<p{_tone(tone)}>{escape(text)}</p>"
        case Table(columns, rows, note):
            return _table(columns, rows) + (f'<p class="muted">{escape(note)}</p>' if note else "")
        case Cards(cards):
            return '<div class="cards">' + "".join(_card(card, marks) for card in cards) + "</div>"
        case Pictures(names):
            drawn = "".join(
                f"<figure>{_labelled(svgs[name], caption)}<figcaption>{escape(caption)}</figcaption></figure>"
                for name, caption in names
            )
            return f'<div class="figures">{drawn}</div>'
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Folded(summary, inner, is_open):
            shown = "\n".join(_block(b, svgs, marks) for b in inner)
            return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{shown}</details>"


def _labelled(svg: str, caption: str) -> str:
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    named = any(columns)
    kind = "" if named else ' class="plain"'
    head = "<tr>" + "".join(f"<th>{escape(c)}</th>" for c in columns) + "</tr>" if named else ""
    body = "".join("<tr>" + "".join(_td(cell) for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table{kind}>{head}{body}</table></div>'


def _td(cell: Cell) -> str:
    names: list[str] = [cell.tone] if cell.tone else []
    if any(isinstance(part, Number) for part in cell.parts):
        names.append("figure")
    return f"<td{_tone(' '.join(names))}>{_parts(cell)}</td>"


def _card(card: Card, marks: Mapping[str, str]) -> str:
    badges = "".join(
        f'<span class="badge {c.tone}"><small>{escape(n)}</small> {_parts(c)}</span>' for n, c in card.badges
    )
    facts = "".join(f"<div><dt>{escape(n)}</dt><dd{_tone(c.tone)}>{_parts(c)}</dd></div>" for n, c in card.facts)
    notes = "".join(f"<p{_tone(note.tone)}>{escape(note.text)}</p>" for note in card.notes)
    mark = marks.get(card.arm, "var(--rule)")
    return (
        f'<section class="card" style="--mark: {mark}"><header><h3>{escape(card.arm)}</h3>{badges}</header>'
        f'<dl class="facts">{facts}</dl>{notes}</section>'
    )
