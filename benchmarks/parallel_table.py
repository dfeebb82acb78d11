"""Every technique on two ranks, one after the other: speed, memory, exposed communication, and whether it still learns.

    python -m benchmarks.parallel_table                                  # two GPUs, train_configs/llama3_1b.toml
    python -m benchmarks.parallel_table --base train_configs/debug_cpu.toml --sequences 8 --micro_batch 4 --steps 18

Runs of ``--steps`` steps are kept under ``--folder`` and not repeated, so the same command goes on after a stop; with
``--budget_s`` it begins no run that would not end in time. A run that fails is a row that says why.

Losses are held against three FSDP runs that differ only in how a step's sequences are split into micro-batches: the
same data, other roundings. The largest spread of the three over all steps is what rounding does here, and a technique
whose loss is at any step further than three times that from their mean is marked.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.two_ranks import (
    BUBBLE,
    RANKS,
    about,
    cells,
    check_steps,
    common_keys,
    facts,
    figures,
    measured,
    only,
    parser_of,
    write,
)

TIMES_SPREAD = 3.0

_PP = {"parallelism.pipeline_parallel_degree": 2}
_ZERO_BUBBLE = {  # refused with compiled blocks and with checkpointing: config/refused_pipeline.py
    "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble",
    "compile.components": ["loss"],
    "activation_checkpoint.mode": "none",
}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "DDP": {"parallelism.zero_stage": 0},
    "ZeRO 1": {"parallelism.zero_stage": 1},
    "ZeRO 2": {"parallelism.zero_stage": 2},
    "ZeRO 3": {"parallelism.zero_stage": 3},
    "TP 2": {"parallelism.tensor_parallel_degree": 2},
    "PP 2, 1F1B": {**_PP, "parallelism.pipeline_parallel_schedule": "1F1B"},
    "PP 2, ZBV": {**_PP, **_ZERO_BUBBLE},
}
"""Row -> what it changes. What is left over is FSDP2 over the other ranks."""
FORMS = {
    "tokens_per_second_per_rank": ",.0f", "against": ".2f", "reserved_gib": ".1f",
    "exposed_communication_percent": ".1f", "communication_percent": ".1f", "bubble_percent": ".1f",
    "largest_difference": ".1e",
}  # fmt: skip
"""Column -> how it is written."""


def plan(steps: int, sequences: int, micro_batch: int) -> dict[str, dict[str, Any]]:
    """Run -> keys over the base. The three "FSDP, ..." runs come first: the others are held against them.

    Args:
        sequences: of an optimizer step.
        micro_batch: sequences of a rank's micro-batch. Pipelines cut it in two.
    """
    common = common_keys(steps) | {"training.global_batch_size": sequences}
    splits = [micro_batch, micro_batch // 2, micro_batch // 4]
    runs = {f"FSDP, micro-batch {size}": common | {"training.local_batch_size": size} for size in splits}
    for name, changes in TECHNIQUES.items():
        runs[name] = common | {"training.local_batch_size": micro_batch} | changes
        if name.startswith("PP"):
            runs[name]["parallelism.pipeline_parallel_microbatch_size"] = micro_batch // 2
    return runs


def spread(reference: list[dict[int, float]]) -> tuple[dict[int, float], float]:
    """(mean loss of each step, the largest difference at any step) of runs that differ in rounding alone."""
    steps = set.intersection(*(set(losses) for losses in reference))
    mean = {step: statistics.fmean(losses[step] for losses in reference) for step in sorted(steps)}
    widest = max(max(of) - min(of) for of in ([losses[step] for losses in reference] for step in steps))
    return mean, widest


def table(results: dict[str, dict[str, Any]], steps: int) -> dict[str, Any]:
    """The rows and the judgement. Without the three FSDP runs no loss is judged: ``within`` is None."""
    splits = [r["losses"] for name, r in results.items() if name.startswith("FSDP") and "losses" in r]
    mean, widest = spread(splits) if len(splits) == 3 else ({}, None)
    rows = {}
    for name, result in results.items():
        if "error" in result:
            rows[name] = {"error": result["error"]}
            continue
        losses = result["losses"]
        away = max((abs(losses[s] - mean[s]) for s in mean if s in losses), default=None)
        whole = len(losses) == steps
        rows[name] = figures(result) | {
            "bubble_percent": result[BUBBLE],
            "largest_difference": away,
            "within": None if away is None or widest is None else whole and away <= TIMES_SPREAD * widest,
        }
    return {"steps": steps, "spread_nats": widest, "rows": rows}


def render(found: dict[str, Any], record: dict[str, Any]) -> str:
    """The table in Markdown."""
    rows = found["rows"]
    fsdp = rows.get("ZeRO 3", {}).get("tokens_per_second_per_rank")

    lines = [
        "| layout | tokens/s/rank | against ZeRO 3 | GiB reserved, rank 0 | exposed comm. % | comm. % | bubble % |"
        " largest loss difference | within 3 x spread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | | | | |")
            continue
        speed = row["tokens_per_second_per_rank"]
        judged = {True: "yes", False: "**no**", None: "-"}[row["within"]]
        shown = cells(row | {"against": speed / fsdp if speed and fsdp else None}, FORMS)
        lines.append(f"| {' | '.join([name, *shown, judged])} |")
    widest = found["spread_nats"]
    spread_is = (
        "no spread: an FSDP run is missing" if widest is None else f"spread of FSDP over splits {widest:.2e} nats"
    )
    return "\n".join([f"{found['steps']} steps each; {spread_is}; {facts(record)}.", "", *lines, ""])


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, write the table. 0: every row is there and within; 1: one is not; 3: out of time."""
    parser = parser_of("parallel_table", __doc__.split("\n")[0], "llama3_1b.toml", 30, TECHNIQUES)
    parser.add_argument("--sequences", type=int, default=16, help="of an optimizer step, over all ranks")
    parser.add_argument("--micro_batch", type=int, default=4, help="sequences of a rank's micro-batch; a multiple of 4")
    chosen = parser.parse_args(arguments)
    if chosen.micro_batch % 4 or chosen.sequences % (RANKS * chosen.micro_batch):
        parser.error(
            f"--micro_batch must be a multiple of 4, and --sequences one of {RANKS} x it: three splits are run"
        )
    check_steps(parser, chosen)
    names = only(parser, chosen, TECHNIQUES)
    runs = plan(chosen.steps, chosen.sequences, chosen.micro_batch)
    runs = {name: keys for name, keys in runs.items() if name in names or name.startswith("FSDP")}
    root = chosen.folder / f"{chosen.base.stem}-{chosen.steps}steps-{chosen.sequences}x{chosen.micro_batch}"
    complete, results = measured(chosen, runs, root)
    found = table(results, chosen.steps)
    record = about(root, chosen, **{"sequences a step": chosen.sequences, "micro-batch": chosen.micro_batch})
    write(chosen.out or root / "parallel_table", {"about": record, **found}, render(found, record))
    if not complete:
        return 3
    return 0 if all(row.get("within") for row in found["rows"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
