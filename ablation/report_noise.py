"""What a report says of the baseline against itself: how far A is from A, and whether its runs are fit to say so."""

from __future__ import annotations

from typing import Any

from ablation.document import DASH, Block, Card, Cell, Heading, Number, Numbers, Table, Text, cell, digits
from ablation.sides import listed
from ablation.wording import validity_cell


def _held(interval: list[float] | None, nothing: float) -> Cell:
    """Whether an A/A interval holds the value of no difference, as it should."""
    if interval is None:
        return cell("n = 1: no interval", tone="muted")
    if interval[0] <= nothing <= interval[1]:
        return cell("no winner", tone="good")
    return cell("a winner: one time in twenty is chance, twice is an instrument error", tone="warning")


def _loss_against_itself(numbers: Numbers, label: str) -> Cell:
    path = f"aa/{label}/loss/against_itself"
    return numbers.with_interval(f"{path}/difference", f"{path}/interval", ratio=False)


def _speed_against_itself(numbers: Numbers, label: str) -> Cell:
    path = f"aa/{label}/speed/against_itself"
    return numbers.with_interval(f"{path}/ratio", f"{path}/interval", ratio=True)


def noise_cards(result: dict[str, Any]) -> list[Card]:
    """The first screen of a question that only asks A/A: a card a baseline."""
    numbers, cards = Numbers(result), []
    for label, aa in result["aa"].items():
        badges, facts = [], []
        loss, speed = aa["loss"], aa["speed"]
        if loss and loss["against_itself"]:
            badges.append(("loss", _held(loss["against_itself"]["interval"], 0.0)))
            facts.append(("loss, disjoint seeds", _loss_against_itself(numbers, label)))
        if speed:
            badges.append(("speed", _held(speed["against_itself"]["interval"], 1.0)))
            facts.append(("tokens/s, same seeds", _speed_against_itself(numbers, label)))
            moved = speed["repeat_loss_difference"]
            if moved is not None:
                told = numbers.plain(f"aa/{label}/speed/repeat_loss_difference")
                facts.append(("loss, same seeds", cell("identical") if moved == 0 else cell("moved up to ", told)))
        items = [item for box in aa["validity"].values() for item in box]
        notes = [Text(f"{item['name']}: {item['reason']}", "bad") for item in items if item["status"] == "INVALID"]
        facts.append(("validity", validity_cell(items)))
        cards.append(Card(label, badges, facts, notes))
    return cards


def noise_blocks(result: dict[str, Any]) -> list[Block]:
    """A/A: the baseline against itself, and its drift since an older directory."""
    numbers, rows = Numbers(result), []
    for label, aa in result["aa"].items():
        path = f"aa/{label}"
        if aa["loss"]:
            rows.append([
                cell(f"{label}: loss of different seeds"), numbers.plain(f"{path}/loss/spread"),
                cell("± ", numbers.plain(f"{path}/loss/band")), cell(f"{aa['loss']['runs']} runs, root mean square"),
            ])  # fmt: skip
            if aa["loss"]["against_itself"]:
                rows.append([
                    cell(f"{label}: disjoint seeds, A against A"), _loss_against_itself(numbers, label), cell(DASH),
                    _held(aa["loss"]["against_itself"]["interval"], 0.0),
                ])  # fmt: skip
        if aa["speed"]:
            spread = Number(digits(100 * aa["speed"]["spread"], 2), f"{path}/speed/spread", "percent")
            band = Number(digits(100 * aa["speed"]["band"], 2), f"{path}/speed/band", "percent")
            moved = aa["speed"]["repeat_loss_difference"]
            same = "loss identical" if moved == 0 else f"loss moved up to {moved:.2g}" if moved is not None else ""
            rows.append([
                cell(f"{label}: tokens/s of repeats"), cell(spread, " %"), cell("± ", band, " %"),
                cell(f"{aa['speed']['runs']} runs; {same}"),
            ])  # fmt: skip
            rows.append([
                cell(f"{label}: tokens/s of repeats against their first runs"), _speed_against_itself(numbers, label),
                cell(DASH), _held(aa["speed"]["against_itself"]["interval"], 1.0),
            ])  # fmt: skip
    for label, drift in result["drift"].items():
        if drift["moved"]:
            told = cell(f"not the same: {listed(drift['moved'])}", tone="warning")
            rows.append([cell(f"{label}: now against then"), cell(DASH), cell(DASH), told])
        for name, ratio in (("loss", False), ("speed", True)):
            if drift[name]:
                path = f"drift/{label}/{name}"
                value = numbers.with_interval(
                    f"{path}/value", f"{path}/interval", ratio=ratio, decimals=None if ratio else 4
                )
                rows.append(
                    [cell(f"{label}: {name} now against then"), value, cell(DASH), cell(f"n = {drift[name]['n']}")]
                )
    if not rows:
        return []
    return [Heading("The baseline against itself"), Table(["", "spread or difference", "band (twice)", ""], rows)]
