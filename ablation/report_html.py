"""Blocks as one HTML file that needs nothing else: style, figures and numbers are inside. Light and dark, wide and
narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ablation.document import Block, Card, Cards, Cell, Code, Folded, Heading, Number, Pictures, Table, Text
from ablation.drawings import CSS_NAMES

# The palette of drawings.py on a dark page: the same hues, lighter.
DARK = {
    "ink": "#d8d8d4", "rule": "#3a3a38", "baseline": "#9a9a95", "band": "#3d3a2e", "arm0": "#5aa9e0", "arm1": "#ef8354",
    "arm2": "#3fc296", "arm3": "#da86c3", "arm4": "#dbad33", "arm5": "#7cc4e6", "arm6": "#a68ee6", "arm7": "#bb9c7c",
}  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --page: #fbfbf9; --card: #ffffff; --muted: #6b6b66; --good: #0d7a55; --bad: #b3261e;
  --warning: #8a6100; --even: #1f5f99; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page: #161615; --card: #1f1f1d; --muted: #a0a09a; --good: #4fcf9f;
  --bad: #ff8a80; --warning: #e6b450; --even: #7cb8ee; DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.6rem; margin: 0 0 .25rem } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem } p { margin: .4rem 0; max-width: 60rem }
.good { color: var(--good) } .bad { color: var(--bad) } .warning { color: var(--warning) } .even { color:
var(--even) } .muted { color: var(--muted) } .question { font-size: 1.05rem }
.cards { display: grid; gap: .8rem; margin: 1rem 0 }
.card { background: var(--card); border: 1px solid var(--rule); border-left: .35rem solid var(--mark);
border-radius: .4rem;
  padding: .8rem 1rem }
.card header { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; align-items: baseline; margin-bottom: .5rem }
.card h3 { margin: 0; font-size: 1.1rem } .badge { font-weight: 600 } .badge small { font-weight: 400; color:
var(--muted) } .facts { display: grid; grid-template-columns: 2.1fr 1.9fr 1fr 1fr 1.2fr .7fr; gap: .5rem 1rem;
margin: 0 } .facts dt { font-size: .8rem; color: var(--muted) } .facts dd { margin: 0; font-variant-numeric:
tabular-nums } .card p { font-size: .9rem; margin: .5rem 0 0 }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: .4rem; margin:
.6rem 0 } table { border-collapse: collapse; width: 100%; font-size: .875rem; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .38rem .75rem; border-bottom: 1px solid var(--rule); vertical-align: top }
th { font-weight: 600; color: var(--muted); white-space: nowrap } tr:last-child td { border-bottom: 0 }
td { min-width: 4rem; max-width: 34rem } td:first-child { min-width: 7.5rem } .plain td:first-child { color:
var(--muted); width: 1% } .plain td:first-child, .plain td.figure { padding-right: 1.5rem } td.figure {
white-space: nowrap } .figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem),
1fr)); gap: 1rem; margin: .8rem 0 } figure { margin: 0; background: var(--card); border: 1px solid var(--rule);
border-radius: .4rem; padding: .6rem } figure svg { display: block; width: 100%; height: auto } figure svg text {
font-family: inherit !important } figcaption { font-size: .85rem; color: var(--muted); padding: .3rem .3rem 0 }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: .4rem; padding:
.7rem .9rem;
  font: .82rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; margin: .6rem 0 }
details { margin: .4rem 0 } summary { cursor: pointer }
@media (max-width: 46rem) { .facts { grid-template-columns: 1fr 1fr } .facts div:nth-child(-n+2) { grid-column: 1 /
-1 }
  .figures { gap: .7rem } figure { padding: .3rem } td { min-width: 3rem } th, td { padding: .38rem .55rem } }
@media print { details > * { display: block } body { max-width: none } }
"""


def _style() -> str:
    light = "; ".join(f"--{name}: {colour}" for colour, name in CSS_NAMES.items())
    dark = "; ".join(f"--{name}: {colour}" for name, colour in DARK.items())
    return STYLE.replace("LIGHT", light).replace("DARK", dark)


def render_html(title: str, blocks: Sequence[Block], svgs: Mapping[str, str], marks: Mapping[str, str]) -> str:
    """The page. ``svgs``: drawings by name; ``marks``: CSS colour of each arm."""
    body = "\n".join(_block(block, svgs, marks) for block in blocks)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_style()}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
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
