"""Blocks as GitHub-flavoured Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ablation.document import Block, Card, Cards, Cell, Code, Folded, Heading, Pictures, Table, Text


def render_markdown(blocks: Sequence[Block]) -> str:
    """The whole report. Pictures are linked as ``<name>.png`` beside the file."""
    return "\n\n".join(_block(block) for block in blocks) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Text(text, tone):
            return f"**{text}**" if tone in ("bad", "warning") else text
        case Table(columns, rows, note):
            lines = [_row(columns), "|" + "---|" * len(columns)]
            lines += [_row([_bold(cell) for cell in row]) for row in rows]
            return "\n".join(lines) + (f"\n\n{note}" if note else "")
        case Cards(cards):
            return _cards(cards)
        case Pictures(names):
            return "\n\n".join(f"![{caption}]({name}.png)\n\n{caption}" for name, caption in names)
        case Code(text):
            return f"```\n{text}\n```"
        case Folded(summary, inner):
            return f"<details><summary>{summary}</summary>\n\n{render_markdown(inner)}\n</details>"


def _cards(cards: Sequence[Card]) -> str:
    labels = [label for label, _ in cards[0].facts]
    lines = [_row(["arm", *(f"{name} verdict" for name, _ in cards[0].badges), *labels])]
    lines.append("|" + "---|" * (1 + len(cards[0].badges) + len(labels)))
    for card in cards:
        verdicts = [f"**{cell.text}**" for _, cell in card.badges]
        lines.append(_row([card.arm, *verdicts, *(cell.text for _, cell in card.facts)]))
    notes = [f"* {card.arm}: {note.text}" for card in cards for note in card.notes]
    return "\n".join(lines) + ("\n\n" + "\n".join(notes) if notes else "")


def _bold(cell: Cell) -> str:
    return f"**{cell.text}**" if cell.tone in ("bad", "warning") and cell.text else cell.text


def _row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"
