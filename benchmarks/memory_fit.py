"""Fit the coefficients of config/estimate.py to the ``fit`` rows of the memory table, and test them on all others.

    python -m benchmarks.memory_fit

Least squares of relative errors, drawn towards 1 (what was counted) by RIDGE: a coefficient that the rows say nothing
about stays where it was. Writes config/memory_coefficients.json with the rows it comes from and the errors of the rows
it has not seen. Needs no GPU.

Exit code: 0 every unseen row is within WITHIN per cent; 1 one is not, or there are too few rows, or of two machines.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.memory_rows import ROWS, Row
from benchmarks.memory_table import MEMORY, read
from config.estimate import NAMES, TABLE, Estimate, estimate
from config.load import load

RIDGE = 1e-3
WITHIN = 10.0
MOST_FITTED, FEWEST_UNSEEN = 8, 6
GIB = 2**30


def foreseen(row: Row, coefficients: dict[str, float]) -> Estimate:
    """The estimate of what ``row`` runs, on one rank."""
    return estimate(load(["--job.config_file", row.config, *row.words]).config, 1, coefficients)


def fit(rows: list[tuple[Row, float]], rounds: int = 50) -> dict[str, float]:
    """Coefficients for which the estimates of ``rows`` come closest to their measured GiB.

    Which moment of a step is fullest depends on the coefficients, so both are found in turn. None is below 0, and of
    weights in bfloat16 no more than all are kept.
    """
    found = dict.fromkeys(NAMES, 1.0)
    estimates = [foreseen(row, found) for row, _ in rows]
    for _ in range(rounds):
        factors, rest = np.zeros((len(rows), len(NAMES))), np.zeros(len(rows))
        for i, ((_, measured), each) in enumerate(zip(rows, estimates, strict=True)):
            rest[i] = measured * GIB
            for part in max(each.moments, key=lambda moment: moment.size(found)).parts:
                if part.coefficient:
                    factors[i, NAMES.index(part.coefficient)] += part.size
                else:
                    rest[i] -= part.size
            factors[i] /= measured * GIB
            rest[i] /= measured * GIB
        left = factors.T @ factors + RIDGE * np.eye(len(NAMES))
        solved = np.linalg.solve(left, factors.T @ rest + RIDGE * np.ones(len(NAMES)))
        for name, value in zip(NAMES, solved, strict=True):
            value = min(max(float(value), 0.0), 1.0 if name == "casts" else np.inf)
            found[name] += 0.5 * (value - found[name])  # half way: the fullest moment may change
    return {name: round(value, 4) for name, value in found.items()}


def error_percent(row: Row, measured: float, coefficients: dict[str, float]) -> float:
    """By how much the estimate is above ``measured`` GiB."""
    return 100 * (foreseen(row, coefficients).peak / GIB / measured - 1)


def measured_rows(folder: Path) -> tuple[list[tuple[Row, float]], list[tuple[Row, float]], list[dict[str, str]]]:
    """Rows to fit and rows to test, with peak active GiB; and the kinds of machine they were measured on."""
    found: dict[bool, list[tuple[Row, float]]] = {True: [], False: []}
    machines: list[dict[str, str]] = []
    for name in ("fit", "check", "switches"):
        for row in ROWS[name]:
            raw = read(folder, row)
            if raw is not None and raw.get("peak_active_gib"):
                found[name == "fit"].append((row, raw["peak_active_gib"]))
                there = {key: raw["identity"][key] for key in ("gpu", "torch")}
                machines += [there] if there not in machines else []
    return found[True], found[False], machines


def main(argv: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rows", type=Path, default=MEMORY, help="folder of the rows' files")
    made.add_argument("--out", type=Path, default=TABLE, help="file of the coefficients")
    chosen = made.parse_args(argv)
    fitted, unseen, machines = measured_rows(chosen.rows)
    if len(fitted) < len(NAMES) or len(unseen) < FEWEST_UNSEEN:
        print(
            f"{chosen.rows}: {len(fitted)} fit rows and {len(unseen)} others are measured; {len(NAMES)} and"
            f" {FEWEST_UNSEEN} are needed. Run python -m benchmarks.memory_table fit check switches on a GPU",
            file=sys.stderr,
        )
        return 1
    if len(machines) > 1:
        kinds = ", ".join(f"{each['gpu']} with torch {each['torch']}" for each in machines)
        print(
            f"{chosen.rows}: rows of {kinds}, and coefficients are those of one. Measure on one alone", file=sys.stderr
        )
        return 1
    assert len(fitted) <= MOST_FITTED
    coefficients = fit(fitted)
    print("| row | fitted | measured GiB | estimate GiB | error |\n|---|---|---|---|---|")
    errors: dict[str, float] = {}
    for row, measured in [*fitted, *unseen]:
        errors[row.name] = round(error_percent(row, measured, coefficients), 2)
        mark = "yes" if (row, measured) in fitted else ""
        guess = foreseen(row, coefficients).peak / GIB
        print(f"| {row.what} | {mark} | {measured:.1f} | {guess:.1f} | {errors[row.name]:+.1f} % |")
    tested = {row.name: errors[row.name] for row, _ in unseen}
    worst = max(abs(e) for e in tested.values())
    table = {
        "coefficients": coefficients,
        "fitted_on": [row.name for row, _ in fitted],
        "unseen": tested,
        "worst_unseen_percent": worst,
        **machines[0],
    }
    chosen.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"\n{coefficients}\nworst of {len(tested)} unseen rows: {worst:.1f} %; written to {chosen.out}")
    return 0 if worst <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
