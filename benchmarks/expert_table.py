"""Experts on two ranks, gathered or sent to: speed, memory, communication, and whether the layouts learn alike.

    python -m benchmarks.expert_table                                    # two GPUs, train_configs/moe_7b_a1b.toml
    python -m benchmarks.expert_table --base train_configs/debug_moe_cpu.toml --sequences 8 --micro_batch 2 --steps 18

Every run has the same micro-batches, each a balance group, so losses differ by rounding, which flips some choices of
experts, and by nothing else: they are held against those of FSDP2.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.two_ranks import (
    FORMS,
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

_EP, _TP = {"parallelism.expert_parallel_degree": 2}, {"parallelism.tensor_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "EP 2, once an expert": _EP | {"moe.dispatcher": "all_to_all"},
    "EP 2, experts in parts": _EP | {"moe.comm_overlap": "experts"},
    "EP 2, once a rank": _EP | {"moe.dispatcher": "all_to_all_dedup"},
    "TP 2": _TP,
    "TP 2 x EP 2": _TP | _EP | {"moe.dispatcher": "all_to_all_dedup"},
}
"""Row -> what it changes. What is left over is FSDP2 over the other ranks."""


def plan(steps: int, sequences: int, micro_batch: int) -> dict[str, dict[str, Any]]:
    """Row -> keys over the base. ``sequences`` of an optimizer step, ``micro_batch`` of them a balance group."""
    batch = {"training.global_batch_size": sequences, "training.local_batch_size": micro_batch}
    common = common_keys(steps) | batch
    return {name: common | changes for name, changes in LAYOUTS.items()}


def table(results: dict[str, dict[str, Any]], steps: int, within: float) -> dict[str, dict[str, Any]]:
    """Layout -> its row.

    Args:
        within: nats between the losses of a layout and of the first that ran, at any step, that rounding may make.
    """
    rows: dict[str, dict[str, Any]] = {}
    first: dict[int, float] | None = None
    for name, result in results.items():
        if "error" in result:
            rows[name] = {"error": result["error"]}
            continue
        losses = result["losses"]
        first = first or losses
        away = max(abs(losses[step] - first[step]) for step in losses.keys() & first.keys())
        rows[name] = figures(result) | {
            "largest_difference": away,
            "agrees": len(losses) == steps and away <= within,
        }
    return rows


def render(rows: dict[str, dict[str, Any]], steps: int, within: float, record: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        f"{steps} steps each; losses agree within {within:g} nats at every step; {facts(record)}.",
        "",
        "| layout | tokens/s/rank | GiB reserved, rank 0 | exposed comm. % | comm. % | final loss | largest loss"
        " difference | agrees |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | | | |")
            continue
        lines.append(f"| {name} | {' | '.join(cells(row, FORMS))} | {'yes' if row['agrees'] else '**no**'} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, write the table. 0: every layout ran and agrees; 1: one did not; 3: out of time."""
    parser = parser_of("expert_table", __doc__.split("\n")[0], "moe_7b_a1b.toml", 20, LAYOUTS)
    parser.add_argument("--sequences", type=int, default=16, help="of an optimizer step, over both ranks")
    parser.add_argument("--micro_batch", type=int, default=4, help="sequences of a rank's micro-batch")
    parser.add_argument("--within", type=float, default=0.03, help="nats that rounding may make of a loss")
    chosen = parser.parse_args(arguments)
    if chosen.sequences % (RANKS * chosen.micro_batch):
        parser.error(f"--sequences must be a multiple of {RANKS} x --micro_batch")
    check_steps(parser, chosen)
    names = only(parser, chosen, LAYOUTS)
    runs = plan(chosen.steps, chosen.sequences, chosen.micro_batch)
    runs = {name: keys for name, keys in runs.items() if name in names}
    root = chosen.folder / f"{chosen.base.stem}-{chosen.steps}steps-{chosen.sequences}x{chosen.micro_batch}"
    complete, results = measured(chosen, runs, root)
    rows = table(results, chosen.steps, chosen.within)
    record = about(root, chosen, **{"sequences a step": chosen.sequences, "micro-batch": chosen.micro_batch})
    page = render(rows, chosen.steps, chosen.within, record)
    write(chosen.out or root / "expert_table", {"about": record, "steps": chosen.steps, "rows": rows}, page)
    if not complete:
        return 3
    return 0 if all(row.get("agrees") for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
