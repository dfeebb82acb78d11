"""Memory and speed of one GPU, switch by switch: a short run of train.py for every row, one after the other.

    python -m benchmarks.memory_table fit check switches --budget_s 540
    python -m benchmarks.memory_table switches --only dense_8b --print

Rows are in benchmarks/memory_rows.py. Each leaves <row>.json in --out, so a command that was interrupted goes on where
it ended; a row of other words, steps, torch or card is measured anew. A row that runs out of memory is a result; one
that failed otherwise says why in its file, and is due again, but takes the place of no measurement. Both sides of a row
are measured in the same session, one machine from its start: a base of an earlier session is measured again before the
first row that needs it, and a row's file keeps what its base measured then. Without its base a row is not run. Without
a GPU a row has no memory and no place in the table. Rows that are fitted need no speed: several such commands may share
a GPU, with --memory_only.

Exit code: 0 every row is there; 1 a row failed, other than for memory; 2 a mistake on the command line; 3 the budget
did not hold all rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.memory_rows import HASTE, ROWS, Row
from benchmarks.rows import RESULTS, save_raw
from benchmarks.run_files import metrics_lines, timed_steps
from benchmarks.side import ROOT, RunFailed, execute, shown

MEMORY = RESULTS / "memory"
STEPS, LOG_FREQ = 6, 3
"""The first three steps are warm-up; log steps are 1, 3 and 6."""
TAGS = {"peak_active_gib": "memory/max_active(GiB)", "peak_reserved_gib": "memory/max_reserved(GiB)"}
BY_NAME = {row.name: row for rows in ROWS.values() for row in rows}
SIDE = (*TAGS, "tokens_per_s", "loss", "error", "session")
"""Of its base, what a row's file keeps."""


def command_of(row: Row, run_dir: str) -> list[str]:
    """What runs ``row``."""
    return [
        sys.executable, "train.py", "--job.config_file", row.config, "--job.run_dir", run_dir,
        "--training.steps", str(STEPS), "--metrics.log_freq", str(LOG_FREQ), *HASTE, *row.words,
    ]  # fmt: skip


def identity_of(row: Row, machine: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for a measurement to be this row's."""
    return {
        "config": row.config,
        "words": [*HASTE, *row.words],
        "steps": STEPS,
        "gpu": machine["gpu_name"],
        "torch": machine["torch"],
    }


def measure(row: Row, machine: dict[str, Any], session: str, commit: str, limit_s: float) -> dict[str, Any]:
    """Run ``row`` and return what its file holds. Peaks are the largest of the run; tokens/s is that of the steps after
    warm-up; ``loss`` is the last step's. A run that failed has ``error`` instead.
    """
    begun = time.monotonic()
    raw: dict[str, Any] = {
        "schema": 1, "name": row.name, "what": row.what, "base": row.base, "identity": identity_of(row, machine),
        "session": session, "commit": commit, "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": machine,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        run_dir = Path(folder) / "run"
        command = command_of(row, str(run_dir))
        raw["command"] = shown(command_of(row, "RUN"))
        try:
            execute(command, ROOT, limit_s)
            raw |= figures(metrics_lines(run_dir))
        except RunFailed as error:
            raw |= {"error": error.reason, "log_tail": error.log_tail}
    return raw | {"seconds": round(time.monotonic() - begun, 1)}


def figures(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the lines of a metrics.jsonl."""
    found: dict[str, Any] = {
        name: max((line[tag] for line in lines if tag in line), default=None) for name, tag in TAGS.items()
    }
    tokens = lines[-1]["tokens"] / lines[-1]["step"]
    times = [seconds for _, seconds in timed_steps(lines)]
    return found | {
        "tokens_per_s": tokens / statistics.median(times) if times else None,
        "loss": lines[-1]["loss_metrics/global_avg_loss"],
        "by_log_step": [{name: line.get(tag) for name, tag in TAGS.items()} | {"step": line["step"]} for line in lines],
    }


def read(folder: Path, row: Row, machine: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The file of ``row``, if it holds a run of it; with ``machine`` only if that was on such a one, and to an end."""
    try:
        raw = json.loads((folder / f"{row.name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    there = machine or {"gpu_name": raw["identity"]["gpu"], "torch": raw["identity"]["torch"]}
    if raw["identity"] != identity_of(row, there) or (machine is not None and failed(raw)):
        return None
    return raw


def failed(raw: dict[str, Any]) -> bool:
    """Whether its run ended badly, for another reason than memory."""
    return "error" in raw and raw["error"] != "out of memory"


def beside(folder: Path, row: Row, machine: dict[str, Any], session: str) -> dict[str, Any] | None:
    """What the base of ``row`` measured in this session; None if it has not."""
    raw = read(folder, BY_NAME[row.base], machine)
    return {key: raw[key] for key in SIDE if key in raw} if raw is not None and raw["session"] == session else None


def due(rows: list[Row], folder: Path, machine: dict[str, Any], session: str, again: bool = False) -> list[Row]:
    """What remains to be run, in order (``again``: all); before the first row of a base, the base, if it is of another
    session.
    """
    found: list[Row] = []
    for row in rows:
        raw = None if again else read(folder, row, machine)
        if row in found or (raw is not None and (not row.base or "beside" in raw)):
            continue
        if row.base and BY_NAME[row.base] not in found and beside(folder, row, machine, session) is None:
            found.append(BY_NAME[row.base])
        found.append(row)
    return found


def table(rows: list[Row], folder: Path) -> str:
    """The measured rows as Markdown: peaks and tokens/s, beside their base's."""
    measured = {row.name: raw for row in rows if (raw := read(folder, row)) is not None}
    out = ["| row | active GiB | reserved GiB | tokens/s | loss |", "|---|---|---|---|---|"]
    for raw in measured.values():
        base = raw.get("beside", {})
        if "error" in raw:
            out.append(f"| {raw['what']} | {raw['error']} | | | |")
            continue
        if raw["peak_active_gib"] is None:
            continue
        less, ratio, speed = "", "", raw["tokens_per_s"]
        if base.get("peak_active_gib") is not None:
            less = f" ({raw['peak_active_gib'] - base['peak_active_gib']:+.1f})"
        if speed and base.get("tokens_per_s"):
            ratio = f" ({speed / base['tokens_per_s']:.3f} x)"
        out.append(
            f"| {raw['what']} | {raw['peak_active_gib']:.1f}{less} | {raw['peak_reserved_gib']:.1f}"
            f" | {format(speed, ',.0f') if speed else '-'}{ratio} | {raw['loss']:.3f} |"
        )
    return "\n".join(out)


def session_of(machine: dict[str, Any]) -> str:
    """Names one machine from its start to its end."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = ""
    return hashlib.sha256(f"{machine['hostname_hash']} {boot}".encode()).hexdigest()[:12]


def main(argv: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("sets", nargs="+", choices=ROWS, metavar="SET", help=f"of rows: {', '.join(ROWS)}")
    made.add_argument("--only", default="", help="rows whose name contains one of these words, comma-separated")
    made.add_argument("--out", type=Path, default=MEMORY, help="folder of the rows' files")
    made.add_argument("--again", action="store_true", help="measure rows anew that are measured")
    made.add_argument("--memory_only", action="store_true", help="leave speeds out: other work runs on the GPU")
    made.add_argument("--print", action="store_true", dest="only_print", help="measure nothing")
    made.add_argument("--budget_s", type=float, default=float("inf"), help="end after so long, keeping what is done")
    made.add_argument("--limit_s", type=float, default=180.0, help="longest run of a row")
    made.add_argument("--commit", help="of the checkout, where git is not at hand")
    chosen = made.parse_args(argv)
    wanted = [word for word in chosen.only.split(",") if word]
    rows = [row for name in chosen.sets for row in ROWS[name] if not wanted or any(word in row.name for word in wanted)]
    if not rows:
        made.error(f"--only {chosen.only}: no row of {' '.join(chosen.sets)} has such a name")
    if chosen.memory_only and any(row.base for row in rows):
        made.error(f"--memory_only with {' '.join(chosen.sets)}: rows that have a base are there for their speed too")
    code = 0 if chosen.only_print else run(rows, chosen)
    print(table(rows, chosen.out))
    return code


def run(rows: list[Row], chosen: argparse.Namespace) -> int:
    """Measure what is due; the exit code."""
    from benchmarks.compare import commit, machine  # they read this machine

    deadline, here = time.monotonic() + chosen.budget_s, machine()
    session, state = session_of(here), chosen.commit or commit()
    left, code = due(rows, chosen.out, here, session, chosen.again), 0
    print(f"{len(left)} of {len(rows)} rows are due", flush=True)
    longest = 0.0
    for row in left:
        if (rest := deadline - time.monotonic()) < longest:
            print(f"{rest:.0f} s are left, the longest run took {longest:.0f} s", flush=True)
            return 3
        base = beside(chosen.out, row, here, session) if row.base else None
        if row.base and base is None:
            print(f"{row.name}: not run, as {row.base} failed", flush=True)
            continue
        raw = measure(row, here, session, state, min(chosen.limit_s, rest))
        if failed(raw) and raw["seconds"] >= rest:
            print(f"{row.name}: the budget ended during its run", flush=True)
            return 3
        if base is not None:
            raw["beside"] = base
        if chosen.memory_only:
            raw["tokens_per_s"] = None
        if not failed(raw) or read(chosen.out, row, here) is None:
            save_raw(chosen.out / f"{row.name}.json", raw)
        longest = max(longest, raw["seconds"])
        code = 1 if failed(raw) else code
        active = raw.get("peak_active_gib")
        print(
            f"{row.name}: {raw.get('error') or ('no GPU' if active is None else f'{active:.2f} GiB active')},"
            f" {raw['seconds']:.0f} s",
            flush=True,
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
