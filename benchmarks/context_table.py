"""Context parallelism on two ranks by sequence length: speed, memory, communication, and whether the methods agree.

    python -m benchmarks.context_table                                   # two GPUs, train_configs/llama3_1b_cp2.toml
    python -m benchmarks.context_table --base train_configs/debug_cp.toml --lengths 128,256 --steps 8

Every length is trained by FSDP2 alone and by each method over two ranks, with the same two sequences a step. Above 64
thousand tokens a step has one, which FSDP2 alone cannot share: no such row. Losses
of a length are held against each other: the difference is rounding, or wrong.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.two_ranks import (
    FORMS,
    PROFILED,
    about,
    cells,
    common_keys,
    facts,
    figures,
    measured,
    only,
    parser_of,
    write,
)

LENGTHS = (8192, 16384, 32768, 65536, 131072)
TWO_SEQUENCES = 65536
"""Tokens up to which a step has two sequences, so that FSDP2 has one a rank; above, one sequence fills both GPUs."""
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


def sequences(length: int) -> int:
    """Of an optimizer step, over both ranks."""
    return 2 if length <= TWO_SEQUENCES else 1


def plan(lengths: list[int], steps: int) -> dict[str, dict[str, Any]]:
    """Run ("8192 ring") -> keys over the base, length by length."""
    return {
        f"{length} {name}": common_keys(steps)
        | {
            "training.seq_len": length,
            "training.local_batch_size": 1,
            "training.global_batch_size": sequences(length),
        }
        | changes
        for length in lengths
        for name, changes in METHODS.items()
        if name != "FSDP" or sequences(length) == 2
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
        losses = result["losses"]
        first = reference.setdefault(length, losses)
        away = max(abs(losses[step] - first[step]) for step in losses.keys() & first.keys())
        rows[name] = {
            "length": int(length),
            "method": method,
            **figures(result),
            "largest_difference": away,
            "agrees": len(losses) == len(first) == steps and away <= within,
        }
    return rows


def render(rows: dict[str, dict[str, Any]], steps: int, within: float, record: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        f"{steps} steps each, of two sequences, above {TWO_SEQUENCES:,} tokens of one;"
        f" losses of a length agree within {within:g} nats at every step;"
        f" {facts(record)}.",
        "",
        "| sequence | method | tokens/s/rank | GiB reserved, rank 0 | exposed comm. % | comm. % | final loss |"
        " largest loss difference | agrees |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows.values():
        start = f"| {row['length']:,} | {row['method']} |"
        if "error" in row:
            lines.append(f"{start} {row['error']} | | | | | | |")
            continue
        lines.append(f"{start} {' | '.join(cells(row, FORMS))} | {'yes' if row['agrees'] else '**no**'} |")
    return "\n".join([*lines, ""])


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, write the table. 0: every method ran and agrees; 1: one did not; 3: out of time."""
    parser = parser_of("context_table", __doc__.split("\n")[0], "llama3_1b_cp2.toml", 20, METHODS)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), metavar="A,B", help="of sequences, in tokens")
    parser.add_argument("--within", type=float, default=0.02, help="nats that rounding may make of a loss")
    chosen = parser.parse_args(arguments)
    if chosen.steps < 2 * PROFILED:
        parser.error(f"--steps must be at least {2 * PROFILED}: the last {PROFILED} are profiled after as many")
    methods = only(parser, chosen, METHODS)
    runs = plan([int(length) for length in chosen.lengths.split(",")], chosen.steps)
    runs = {name: keys for name, keys in runs.items() if name.partition(" ")[2] in methods}
    root = chosen.folder / f"{chosen.base.stem}-{chosen.steps}steps"
    complete, results = measured(chosen, runs, root)
    rows = table(results, chosen.steps, chosen.within)
    record = about(root, chosen)
    page = render(rows, chosen.steps, chosen.within, record)
    write(chosen.out or root / "context_table", {"about": record, "steps": chosen.steps, "rows": rows}, page)
    if not complete:
        return 3
    return 0 if all(row.get("agrees") for row in rows.values() if row["method"] != "FSDP") else 1


if __name__ == "__main__":
    sys.exit(main())
