"""Experts on two ranks, gathered or sent to: speed, memory, communication, and whether the layouts learn alike.

    python -m benchmarks.expert_table                                    # two GPUs, train_configs/moe_7b_a1b.toml
    python -m benchmarks.expert_table --base train_configs/debug_moe_cpu.toml --sequences 8 --micro_batch 2 --steps 18

As in benchmarks/parallel_table.py finished runs are kept and not repeated, and a run that fails is a row that says why.
Every run has the same micro-batches, each a balance group, so losses differ by rounding, which flips some choices of
experts, and by nothing else: they are held against those of FSDP2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.parallel_table import (
    COMMUNICATION,
    EXPOSED,
    MEMORY,
    PROFILED,
    RANKS,
    ROOT,
    WARM_UP,
    about,
    folder_name,
    read,
    run_all,
)

_EP, _TP = {"parallelism.expert_parallel_degree": 2}, {"parallelism.tensor_parallel_degree": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "EP 2, once an expert": _EP | {"moe.dispatcher": "all_to_all"},
    "EP 2, once a rank": _EP | {"moe.dispatcher": "all_to_all_dedup"},
    "TP 2": _TP,
    "TP 2 x EP 2": _TP | _EP | {"moe.dispatcher": "all_to_all_dedup"},
}
"""Row -> what it changes. What is left over is FSDP2 over the other ranks."""


def plan(steps: int, sequences: int, micro_batch: int) -> dict[str, dict[str, Any]]:
    """Row -> keys over the base. ``sequences`` of an optimizer step, ``micro_batch`` of them a balance group."""
    common = {
        "training.steps": steps,
        "training.global_batch_size": sequences,
        "training.local_batch_size": micro_batch,
        "training.mixed_precision_param": "bfloat16",
        "validation.enable": False,
        "checkpoint.enable": False,
        "metrics.log_freq": 1,
        "profiling.enable_profiling": True,
        "profiling.profile_freq": steps,
        "profiling.profiler_active": PROFILED,
        "profiling.profiler_warmup": PROFILED,
    }
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
        losses, step_s = result["losses"], result["step_s"]
        first = first or losses
        away = max(abs(losses[step] - first[step]) for step in losses.keys() & first.keys())
        rows[name] = {
            "tokens_per_second_per_rank": step_s and result["tokens_per_step"] / result["world_size"] / step_s,
            "reserved_gib": result[MEMORY],
            "exposed_communication_percent": result[EXPOSED],
            "communication_percent": result[COMMUNICATION],
            "final_loss": losses[max(losses)],
            "largest_difference": away,
            "agrees": len(losses) == steps and away <= within,
        }
    return rows


def render(rows: dict[str, dict[str, Any]], steps: int, within: float, record: dict[str, Any]) -> str:
    """The table in Markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in record.items() if value is not None)
    lines = [
        f"{steps} steps each; losses agree within {within:g} nats at every step; {facts}.",
        "",
        "| layout | tokens/s/rank | GiB reserved, rank 0 | exposed comm. % | comm. % | final loss | largest loss"
        " difference | agrees |",
        "|---|---|---|---|---|---|---|---|",
    ]
    forms = {
        "tokens_per_second_per_rank": ",.0f", "reserved_gib": ".1f", "exposed_communication_percent": ".1f",
        "communication_percent": ".1f", "final_loss": ".4f", "largest_difference": ".1e",
    }  # fmt: skip
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | | | |")
            continue
        cells = ["-" if row[key] is None else format(row[key], form) for key, form in forms.items()]
        lines.append(f"| {name} | {' | '.join(cells)} | {'yes' if row['agrees'] else '**no**'} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, write the table. 0: every layout ran and agrees; 1: one did not; 3: out of time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expert_table", description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, default=ROOT / "train_configs" / "moe_7b_a1b.toml", metavar="TOML")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "expert_table", help="of the runs")
    parser.add_argument("--out", type=Path, help="of the table, without a suffix: .json and .md (default: in --folder)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=16, help="of an optimizer step, over both ranks")
    parser.add_argument("--micro_batch", type=int, default=4, help="sequences of a rank's micro-batch")
    parser.add_argument("--only", default="", metavar="A;B", help=f"of {'; '.join(LAYOUTS)}")
    parser.add_argument("--within", type=float, default=0.03, help="nats that rounding may make of a loss")
    parser.add_argument("--budget_s", type=float, default=float("inf"), help="seconds after which nothing runs")
    chosen = parser.parse_args(arguments)
    if chosen.sequences % (RANKS * chosen.micro_batch):
        parser.error(f"--sequences must be a multiple of {RANKS} x --micro_batch")
    if chosen.steps <= WARM_UP + 2 * PROFILED:
        parser.error(f"--steps must be above {WARM_UP + 2 * PROFILED}: warm-up and profiled steps tell no speed")
    only = [name for name in chosen.only.split(";") if name]
    if unknown := [name for name in only if name not in LAYOUTS]:
        parser.error(f"--only: {unknown[0]!r} is none of {'; '.join(LAYOUTS)}")
    runs = plan(chosen.steps, chosen.sequences, chosen.micro_batch)
    runs = {name: keys for name, keys in runs.items() if not only or name in only}
    root = chosen.folder / f"{chosen.base.stem}-{chosen.steps}steps-{chosen.sequences}x{chosen.micro_batch}"
    complete = run_all(runs, chosen.base.resolve(), root, until=time.monotonic() + chosen.budget_s)
    rows = table({name: read(root / folder_name(name)) for name in runs}, chosen.steps, chosen.within)
    record = about(root, chosen.base, chosen.sequences, chosen.micro_batch)
    page = render(rows, chosen.steps, chosen.within, record)
    out = chosen.out or root / "expert_table"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"about": record, "steps": chosen.steps, "rows": rows}, indent=1))
    out.with_suffix(".md").write_text(page)
    print(page)
    if not complete:
        return 3
    return 0 if all(row.get("agrees") for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
