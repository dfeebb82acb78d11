"""Build benchmarks/results/speed.json from the raw files in benchmarks/results/speed/.

    python -m benchmarks.speed_table

A row whose TFLOP/s are above the card's peak is an error of measurement: nothing is written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import titan
from benchmarks.rows import RESULTS, SPEED, row_of, sentence


def build_table(folder: Path) -> list[dict[str, Any]]:
    """The row of every raw file of ``folder``, by file name.

    Raises:
        ValueError: a figure is above what the card can do.
    """
    rows = []
    for path in sorted(folder.glob("*.json")):
        row = row_of(json.loads(path.read_text(encoding="utf-8")), f"{folder.name}/{path.name}")
        peak = titan.peak_flops(row["gpu"]) if row["gpu"] else None
        for side in ("ours", "peer"):
            tflops = row[f"{side}_tflops"]
            if peak is not None and tflops is not None and tflops * 1e12 > peak:
                raise ValueError(
                    f"{path}: {tflops:,.0f} TFLOP/s of {side} is above the {peak / 1e12:,.0f} of a {row['gpu']}: "
                    "the time or the number of tokens is measured wrongly"
                )
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Write the table and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=SPEED, help="of raw files")
    parser.add_argument("--out", type=Path, default=RESULTS / "speed.json")
    arguments = parser.parse_args(argv)
    try:
        rows = build_table(arguments.folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(sentence(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
