"""What a report says, in order: the first screen, then the evidence. Returns blocks; see document.py."""

from __future__ import annotations

import json
from typing import Any

from ablation.document import (
    DASH,
    Block,
    Card,
    Cards,
    Cell,
    Folded,
    Heading,
    Number,
    Numbers,
    Pictures,
    Table,
    Text,
    Tone,
    cell,
    decimals_of_spread,
)
from ablation.drawings import shaded
from ablation.report_evidence import evidence_blocks
from ablation.report_noise import noise_blocks, noise_cards
from ablation.wording import (
    decision_line,
    expectation_line,
    left_nothing_line,
    loss_cell,
    loss_decimals,
    memory_cell,
    metric_cell,
    seed_mark,
    speed_cell,
    validity_cell,
    verdict_cell,
    verdict_line,
)

CAPTIONS = {
    "verdict_loss": "Loss difference and the interval that decides. Strokes: seeds.",
    "verdict_speed": "Tokens/s against the baseline. Strokes: seeds.",
    "loss_tokens": "At equal tokens: seeds thin, mean bold. The fall of the first quarter is cut off above.",
    "loss_seconds": "At equal training time, without compilation, checkpoints and validation.",
    "loss_difference": "Difference from the baseline at equal tokens: seeds thin, mean bold.",
    "throughput": "Throughput over the run, excluded steps left out.",
    "variable": "Over the variable: means joined, seeds as strokes.",
    "tune": "The tune grid of every arm; the filled point is compared.",
    "expert_load": "Load of each expert against the mean, at the end.",
}
SHADED = {
    "verdict_loss": "Shaded: the band.",
    "verdict_speed": "Shaded: the speed band.",
    "loss_difference": "Shaded: twice what seeds of the baseline differ by.",
}


def content(result: dict[str, Any], figures: set[str], note: str = "") -> list[Block]:
    """The blocks of a report. ``figures``: names that were drawn; ``note``: why there are none."""
    blocks: list[Block] = [*_first_screen(result), *([Text(note, "warning")] if note else [])]
    blocks.append(_pictures(result, figures, ("verdict_loss", "verdict_speed")))
    if not result["comparisons"]:
        blocks += noise_blocks(result)
    blocks += _question(result)
    blocks += _validity(result)
    blocks += [*_paired_tables(result), *_contrasts(result)]
    blocks += [
        Heading("Curves"),
        _pictures(
            result, figures, ("loss_tokens", "loss_seconds", "loss_difference", "throughput", "variable", "tune")
        ),
    ]
    if "expert_load" in figures:
        blocks += [Heading("Expert load"), _pictures(result, figures, ("expert_load",))]
    blocks += [*(noise_blocks(result) if result["comparisons"] else []), *evidence_blocks(result)]
    return [block for block in blocks if not (isinstance(block, Pictures) and not block.names)]


def _pictures(result: dict[str, Any], figures: set[str], names: tuple[str, ...]) -> Pictures:
    captions = CAPTIONS | {name: f"{CAPTIONS[name]} {SHADED[name]}" for name in shaded(result)}
    return Pictures([(name, captions[name]) for name in names if name in figures])


def _first_screen(result: dict[str, Any]) -> list[Block]:
    numbers = Numbers(result)
    cards = []
    for i, c in enumerate(result["comparisons"]):
        bad = [item for item in c["validity"] if item["status"] in ("INVALID", "unpaired")]
        notes = [Text(f"{item['name']}: {item['reason']}", "bad") for item in bad]
        if expectation_line(c):
            notes.append(Text(expectation_line(c), "bad" if c["expectation"] == "violated" else ""))
        facts = [
            ("loss difference", loss_cell(numbers, i)),
            ("tokens/s/device", speed_cell(numbers, i)),
            ("peak memory", memory_cell(numbers, i)),
            ("device-hours", metric_cell(numbers, i, "device-hours")),
            ("validity", validity_cell(c["validity"], c["tier"])),
            ("seeds", cell(seed_mark(max(c["loss"]["n"], c["speed"]["n"])))),
        ]
        badges = [("loss", verdict_cell(c["loss"])), ("speed", verdict_cell(c["speed"]))]
        cards.append(Card(c["arm"], badges, facts, notes))
    question = str(result["question"].get("question") or f"{result['baseline']} against its alternatives")
    first = Cards(cards or noise_cards(result))
    decided = Text(decision_line(result).text, "muted")
    lost = [Text(left_nothing_line(result), "bad")] if result["left_nothing"] else []
    return [Heading(result["name"], 1), Text(question), first, *lost, *_baselines(numbers), decided]


def _baselines(numbers: Numbers) -> list[Text]:
    """The absolute numbers that the changes above refer to."""
    lines = []
    for label, arm in numbers.result["arms"].items():
        if arm["role"] == "baseline" and arm["metric"] and arm["rate"]:
            metric = numbers.plain(f"arms/{label}/metric/mean", loss_decimals(numbers.result)).text
            rate = numbers.plain(f"arms/{label}/rate/mean").text
            told = f"{numbers.result['decision']['metric']} {metric}, {rate} tokens/s/device"
            lines.append(Text(f"Baseline {label}: {told}, {seed_mark(arm['metric']['n'])}.", "muted"))
    return lines


def _question(result: dict[str, Any]) -> list[Block]:
    question = result["question"]
    told = [(key, question.get(key)) for key in ("question", "hypothesis", "variable", "expected", "design", "hold")]
    rows = [[cell(key), cell(value if isinstance(value, str) else json.dumps(value))] for key, value in told if value]
    blocks: list[Block] = [Heading("Question and change")]
    if rows:
        blocks.append(Table(["", ""], rows))
    changes = []
    for c in result["comparisons"]:
        kinds = (("variable", "variable", ""), ("followers", "follows", "muted"), ("derived", "derived", "muted"))
        for name, kind, tone in kinds:
            for key, (before, after) in c[name].items():
                row = [c["arm"], kind, key, json.dumps(before), json.dumps(after)]
                changes.append([cell(text, tone=tone) for text in row])  # type: ignore[arg-type]
    if changes:
        blocks.append(Table(["arm", "", "key", "baseline", "arm's value"], changes))
    return blocks


_STATUS: dict[str, tuple[str, Tone]] = {
    "ok": ("ok", "good"),
    "warning": ("warning", "warning"),
    "unpaired": ("not paired", "bad"),
    "INVALID": ("INVALID", "bad"),
}


def _validity(result: dict[str, Any]) -> list[Block]:
    boxes = [(c["arm"], c["validity"]) for c in result["comparisons"]]
    boxes += [
        (f"{label}, {which}", items) for label, aa in result["aa"].items() for which, items in aa["validity"].items()
    ]
    blocks: list[Block] = [Heading("Validity")] if boxes else []
    for name, items in boxes:
        rows = []
        for item in items:
            word, tone = _STATUS[item["status"]]
            rows.append([cell(word, tone=tone), cell(item["name"]), cell(item["reason"])])
        broken = sum(item["status"] != "ok" for item in items)
        state = f"{broken} of {len(rows)} not ok" if broken else f"all {len(rows)} ok"
        blocks.append(Folded(f"{name}: {state}", [Table(["", "check", "found"], rows)], open=broken > 0))
    return blocks


def _interval_words(part: dict[str, Any]) -> str:
    return f"{100 * part['confidence']:.3g} %" if part["confidence"] else "95 %"


def _paired_tables(result: dict[str, Any]) -> list[Block]:
    numbers = Numbers(result)
    blocks: list[Block] = [Heading("Paired tables")] if result["comparisons"] else []
    places = loss_decimals(result)
    for i, c in enumerate(result["comparisons"]):
        rows = []
        for j, row in enumerate(c["metrics"]):
            path = f"comparisons/{i}/metrics/{j}"
            decimals = places if row["unit"] in ("nats/token", "bits") else None
            moved = numbers.with_interval(
                f"{path}/value", f"{path}/interval", ratio=row["kind"] == "ratio", decimals=decimals
            )
            rows.append([
                cell(row["name"]), moved, _mean_sd(numbers, row, f"{path}/baseline", decimals and 4),
                _mean_sd(numbers, row, f"{path}/candidate", decimals and 4), cell(str(row["n"])),
                cell(row["unit"], tone="muted"),
            ])  # fmt: skip
        loss, speed = c["loss"], c["speed"]
        used = [_interval_words(part) for part in (loss, speed)]
        levels = f"The verdicts use {used[0]} (loss) and {used[1]} (tokens/s); here 95 %."
        blocks += [
            Heading(f"{c['arm']} against {c['baseline']}", 3),
            Text(verdict_line(result, i)),
            Table(
                ["metric", "change [95 %]", "baseline, mean ± sd", f"{c['arm']}, mean ± sd", "n", "unit"],
                rows,
                levels if set(used) != {"95 %"} else "",
            ),
            *_further(numbers, i),
        ]
    return blocks


def _contrasts(result: dict[str, Any]) -> list[Block]:
    """Interactions of a factorial, or steps of a ladder."""
    numbers, rows = Numbers(result), []
    for i, row in enumerate(result["contrasts"]):
        cells = [
            numbers.with_interval(
                f"contrasts/{i}/{name}/value",
                f"contrasts/{i}/{name}/interval",
                ratio=name == "speed",
                decimals=loss_decimals(result) if name == "loss" else None,
            )
            if row[name]
            else cell(DASH, tone="muted")
            for name in ("loss", "speed")
        ]
        rows.append([cell(row["arm"]), cell(row["kind"]), *cells])
    if not rows:
        return []
    factorial = result["question"].get("design") == "factorial"
    note = "Effects add in loss and multiply in speed where nothing interacts. " if factorial else ""
    note += "Estimates at 95 % each, without a verdict."
    columns = ["arm", "", "loss difference", "tokens/s/device"]
    return [Heading("Interactions" if factorial else "Steps of the ladder", 3), Table(columns, rows, note)]


def _mean_sd(numbers: Numbers, row: dict[str, Any], path: str, decimals: int | None) -> Cell:
    side = row[path.rpartition("/")[2]]
    if side is None:
        return cell(DASH, tone="muted")
    if side["sd"] and decimals is None:
        decimals = decimals_of_spread(side["sd"])
    head = numbers.plain(f"{path}/mean", decimals)
    return head if side["sd"] is None else cell(head, " ± ", numbers.plain(f"{path}/sd", decimals))


def _further(numbers: Numbers, index: int) -> list[Block]:
    """Equal wall clock, cost to the baseline's loss, p values, what was promised."""
    c, path = numbers.result["comparisons"][index], f"comparisons/{index}"
    rows = []
    if c["equal_time"]:
        value = numbers.with_interval(f"{path}/equal_time/value", f"{path}/equal_time/interval", ratio=False)
        rows.append([cell("loss at equal training time"), value, cell(f"n = {c['equal_time']['n']}")])
    if c["cost"]:
        value = numbers.with_interval(f"{path}/cost/value", f"{path}/cost/interval", ratio=True)
        reached = f"reached by {c['cost']['reached']} of {c['cost']['of']} seeds"
        rows.append([cell("device-hours to the baseline's final loss"), value, cell(reached)])
    for name in ("loss", "speed"):
        if c[name]["p_value"] is not None:
            p = Number(f"{c[name]['p_value']:.3g}", f"{path}/{name}/p_value")
            rows.append([cell(f"p, {name}"), cell(p), cell("exact sign-flip, Holm-adjusted")])
    blocks: list[Block] = [Table(["", "", ""], rows)] if rows else []
    if expectation_line(c):
        blocks.append(Text(expectation_line(c), "bad" if c["expectation"] == "violated" else ""))
    return blocks
