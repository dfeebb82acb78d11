"""Context parallelism on two ranks by sequence length: speed, memory, communication, and whether the methods agree.

    python -m benchmarks.context_table                                   # two GPUs, train_configs/llama3_1b_cp2.toml
    python -m benchmarks.context_table --base train_configs/debug_cp.toml --lengths 128,256 --steps 8

Every length is trained by FSDP2 alone, where its memory allows, and by each method over two ranks, with the same two
sequences a step. As in benchmarks/parallel_table.py finished runs are kept and not repeated, and a run that fails is a
row that says why. Losses of a length are held against each other: the difference is rounding, or wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.parallel_table import COMMUNICATION, EXPOSED, MEMORY, PROFILED, ROOT, about, folder_name, read, run_all

LENGTHS = (8192, 16384, 32768, 65536, 131072)
SEQUENCES = 2
"""Of an optimizer step, over both ranks."""
METHODS: dict[str, dict[str, Any]] = {
    "FSDP": {"parallelism.context_parallel_degree": 1},
    "ring": {"parallelism.context_parallel_method": "ring"},
    "ring, contiguous": {
        "parallelism.context_parallel_method": "ring",
        "parallelism.context_parallel_layout": "contiguous",
    },
    "allgather": {"parallelism.context_parallel_method": "allgather"},
    "ulysses": {"parallelism.context_parallel_method": "ulysses"},
}
"""Row -> what it changes. The base says how two ranks share a sequence."""


def plan(lengths: list[int], steps: int) -> dict[str, dict[str, Any]]:
    """Run ("8192 ring") -> keys over the base, length by length."""
    return {
        f"{length} {name}": {
            "training.steps": steps,
            "training.seq_len": length,
            "training.local_batch_size": 1,
            "training.global_batch_size": SEQUENCES,
            "training.mixed_precision_param": "bfloat16",
            "validation.enable": False,
            "checkpoint.enable": False,
            "metrics.log_freq": 1,
            "profiling.enable_profiling": True,
            "profiling.profile_freq": steps,
            "profiling.profiler_active": PROFILED,
            "profiling.profiler_warmup": PROFILED,
        }
        | changes
        for length in lengths
        for name, changes in METHODS.items()
    }


def table(results: dict[str, dict[str, Any]], steps: int, within: float) -> dict[str, dict[str, Any]]:
    """Run -> its row. A loss is held against the first run of its length that has all ``steps``.

    Args:
        within: nats at any step beyond which a difference is no rounding.
    """
    rows: dict[str, dict[str, Any]] = {}
    reference: dict[str, dict[int, float]] = {}
    for name, result in results.items():
        length, _, method = name.partition(" ")
        if "error" in result:
            rows[name] = {"length": int(length), "method": method, "error": result["error"]}
            continue
        losses, step_s = result["losses"], result["step_s"]
        first = reference.setdefault(length, losses)
        away = max(abs(losses[step] - first[step]) for step in losses.keys() & first.keys())
        rows[name] = {
            "length": int(length),
            "method": method,
            "tokens_per_second_per_rank": step_s and result["tokens_per_step"] / result["world_size"] / step_s,
            "reserved_gib": result[MEMORY],
            "exposed_communication_percent": result[EXPOSED],
            "communication_percent": result[COMMUNICATION],
            "final_loss": losses[max(losses)],
            "largest_difference": away,
            "agrees": len(losses) == len(first) == steps and away <= within,
        }
    return rows


def render(rows: dict[str, dict[str, Any]], steps: int, within: float, record: dict[str, Any]) -> str:
    """The table in Markdown."""
    facts = ", ".join(f"{key} {value}" for key, value in record.items() if value is not None)
    lines = [
        f"{steps} steps of {SEQUENCES} sequences each; losses of a length agree within {within:g} nats at every step;"
        f" {facts}.",
        "",
        "| sequence | method | tokens/s/rank | GiB reserved, rank 0 | exposed comm. % | comm. % | final loss |"
        " largest loss difference | agrees |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    for row in rows.values():
        start = f"| {row['length']:,} | {row['method']} |"
        if "error" in row:
            lines.append(f"{start} {row['error']} | | | | | | |")
            continue
        cells = [
            shown(row["tokens_per_second_per_rank"], ",.0f"),
            shown(row["reserved_gib"], ".1f"),
            shown(row["exposed_communication_percent"], ".1f"),
            shown(row["communication_percent"], ".1f"),
            shown(row["final_loss"], ".4f"),
            shown(row["largest_difference"], ".1e"),
            "yes" if row["agrees"] else "**no**",
        ]
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, write the table. 0: every method ran and agrees; 1: one did not; 3: out of time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context_table", description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, default=ROOT / "train_configs" / "llama3_1b_cp2.toml", metavar="TOML")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "context_table", help="of the runs")
    parser.add_argument("--out", type=Path, help="of the table, without a suffix: .json and .md (default: in --folder)")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), metavar="A,B", help="of sequences, in tokens")
    parser.add_argument("--only", default="", metavar="A;B", help=f"of {'; '.join(METHODS)}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--within", type=float, default=0.02, help="nats that rounding may make of a loss")
    parser.add_argument("--budget_s", type=float, default=float("inf"), help="seconds after which nothing runs")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 2 * PROFILED:
        parser.error(f"--steps must be at least {2 * PROFILED}: the last {PROFILED} are profiled after as many")
    only = [name for name in chosen.only.split(";") if name]
    if unknown := [name for name in only if name not in METHODS]:
        parser.error(f"--only: {unknown[0]!r} is none of {'; '.join(METHODS)}")
    runs = plan([int(length) for length in chosen.lengths.split(",")], chosen.steps)
    runs = {name: keys for name, keys in runs.items() if not only or name.partition(" ")[2] in only}
    root = chosen.folder / f"{chosen.base.stem}-{chosen.steps}steps"
    complete = run_all(runs, chosen.base.resolve(), root, until=time.monotonic() + chosen.budget_s)
    rows = table({name: read(root / folder_name(name)) for name in runs}, chosen.steps, chosen.within)
    record = {key: value for key, value in about(root, chosen.base, SEQUENCES, 1).items() if key != "sequences a step"}
    page = render(rows, chosen.steps, chosen.within, record)
    out = chosen.out or root / "context_table"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"about": record, "steps": chosen.steps, "rows": rows}, indent=1))
    out.with_suffix(".md").write_text(page)
    print(page)
    if not complete:
        return 3
    return 0 if all(row.get("agrees") for row in rows.values() if row["method"] != "FSDP") else 1


if __name__ == "__main__":
    sys.exit(main())
