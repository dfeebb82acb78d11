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

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOSS, BUBBLE = "loss_metrics/global_avg_loss", "pipeline/bubble(%)"
MEMORY, EXPOSED, COMMUNICATION = "memory/max_reserved(GiB)", "comm/exposed(%)", "comm/total(%)"
RANKS = 2
WARM_UP = 10
"""Steps that say nothing about speed, beside those that the run itself leaves out."""
TIMES_SPREAD = 3.0
PROFILED = 3
"""Steps at the end of a run that are profiled, after as many of warm-up."""

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


def plan(steps: int, sequences: int, micro_batch: int) -> dict[str, dict[str, Any]]:
    """Run -> keys over the base. The three "FSDP, ..." runs come first: the others are held against them.

    Args:
        sequences: of an optimizer step.
        micro_batch: sequences of a rank's micro-batch. Pipelines cut it in two.
    """
    common = {
        "training.steps": steps,
        "training.global_batch_size": sequences,
        "training.mixed_precision_param": "bfloat16",
        "validation.enable": False,
        "checkpoint.enable": False,
        "metrics.log_freq": 1,
        "profiling.enable_profiling": True,
        "profiling.profile_freq": steps,
        "profiling.profiler_active": PROFILED,
        "profiling.profiler_warmup": PROFILED,
    }
    splits = [micro_batch, micro_batch // 2, micro_batch // 4]
    runs = {f"FSDP, micro-batch {size}": common | {"training.local_batch_size": size} for size in splits}
    for name, changes in TECHNIQUES.items():
        runs[name] = common | {"training.local_batch_size": micro_batch} | changes
        if name.startswith("PP"):
            runs[name]["parallelism.pipeline_parallel_microbatch_size"] = micro_batch // 2
    return runs


def command(base: Path, folder: Path, changes: dict[str, Any]) -> list[str]:
    """The words that run one of them."""
    words = [sys.executable, str(ROOT / "ablation_train.py"), "--job.config_file", str(base)]
    for key, value in (changes | {"job.run_dir": str(folder)}).items():
        words += [f"--{key}", value if isinstance(value, str) else json.dumps(value)]
    return words


def state(folder: Path) -> str:
    """ "done", "failed" or "open": to be run, or run again after a stop."""
    if (folder / "DONE").is_file():
        return "done"
    failed = folder / "FAILED"
    return "failed" if failed.is_file() and json.loads(failed.read_text())["reason"] != "interrupted" else "open"


def run_all(
    runs: dict[str, dict[str, Any]], base: Path, root: Path, *, until: float, say: Callable[[str], None] = print
) -> bool:
    """Run what is not done; True when nothing is left. A failed run is left alone: remove its folder to try again.

    Args:
        until: ``time.monotonic()`` after which nothing runs. A run is begun when the longest so far would end by then.
    """
    longest = 0.0
    for name, changes in runs.items():
        folder = root / folder_name(name)
        if state(folder) != "open":
            continue
        begun = time.monotonic()
        if begun + longest > until:
            say(f"out of time before {name}: the same command goes on")
            return False
        say(f"{name} ...")
        environment = os.environ | {"NGPU": str(RANKS)}
        words = command(base, folder, changes)
        done = subprocess.run(words, cwd=ROOT, env=environment, text=True, capture_output=True)
        if state(folder) == "open":  # refused or killed before it could say so
            folder.mkdir(parents=True, exist_ok=True)
            reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            (folder / "FAILED").write_text(json.dumps({"reason": reason[0]}))
        longest = max(longest, time.monotonic() - begun)
        say(f"{name}: {state(folder)} in {time.monotonic() - begun:.0f} s")
    return True


def folder_name(name: str) -> str:
    """Of a run's directory."""
    return name.lower().replace(",", "").replace(" ", "_")


def read(folder: Path) -> dict[str, Any]:
    """What a run left: ``losses`` (step -> nats), ``step_s`` (median), ``tokens_per_step``, ``world_size`` and tags.

    A run that failed has ``error`` alone. What was not measured is None.
    """
    if state(folder) != "done":
        failed = folder / "FAILED"
        return {"error": json.loads(failed.read_text())["reason"] if failed.is_file() else "not run"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    record = json.loads((folder / "run.json").read_text())
    logged = [line for line in lines if LOSS in line]
    times, before = [], 0
    for line in logged:
        for step, seconds in zip(range(before + 1, line["step"] + 1), line["step_times_s"], strict=False):
            if step > WARM_UP and step not in line["excluded_steps"]:
                times.append(seconds)
        before = line["step"]
    seen = {tag: [line[tag] for line in lines if tag in line] for tag in (MEMORY, EXPOSED, COMMUNICATION, BUBBLE)}
    return {
        "losses": {line["step"]: line[LOSS] for line in logged},
        "step_s": statistics.median(times) if times else None,
        "tokens_per_step": record["tokens_per_step"],
        "world_size": record["world_size"],
        MEMORY: max(seen[MEMORY], default=None),
        **{tag: seen[tag][-1] if seen[tag] else None for tag in (EXPOSED, COMMUNICATION)},
        BUBBLE: statistics.median(seen[BUBBLE]) if seen[BUBBLE] else None,
    }


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
        losses, step_s = result["losses"], result["step_s"]
        away = max((abs(losses[s] - mean[s]) for s in mean if s in losses), default=None)
        whole = len(losses) == steps
        rows[name] = {
            "tokens_per_second_per_rank": step_s and result["tokens_per_step"] / result["world_size"] / step_s,
            "reserved_gib": result[MEMORY],
            "exposed_communication_percent": result[EXPOSED],
            "communication_percent": result[COMMUNICATION],
            "bubble_percent": result[BUBBLE],
            "final_loss": losses[max(losses)],
            "largest_difference": away,
            "within": None if away is None or widest is None else whole and away <= TIMES_SPREAD * widest,
        }
    return {"steps": steps, "spread_nats": widest, "rows": rows}


def render(found: dict[str, Any], record: dict[str, Any]) -> str:
    """The table in Markdown."""
    rows = found["rows"]
    fsdp = rows.get("ZeRO 3", {}).get("tokens_per_second_per_rank")

    def shown(value: float | None, form: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value * scale, form)

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
        cells = [
            name,
            shown(speed, ",.0f"),
            shown(speed / fsdp if speed and fsdp else None, ".2f"),
            shown(row["reserved_gib"], ".1f"),
            shown(row["exposed_communication_percent"], ".1f"),
            shown(row["communication_percent"], ".1f"),
            shown(row["bubble_percent"], ".1f"),
            shown(row["largest_difference"], ".1e"),
            {True: "yes", False: "**no**", None: "-"}[row["within"]],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    widest = found["spread_nats"]
    judged = "no spread: an FSDP run is missing" if widest is None else f"spread of FSDP over splits {widest:.2e} nats"
    facts = ", ".join(f"{key} {value}" for key, value in record.items() if value is not None)
    return "\n".join([f"{found['steps']} steps each; {judged}; {facts}.", "", *lines, ""])


def about(root: Path, base: Path, sequences: int, micro_batch: int) -> dict[str, Any]:
    """Where and with what the runs were made, from the first that says."""
    facts: dict[str, Any] = {"base": base.name, "sequences a step": sequences, "micro-batch": micro_batch}
    for path in sorted(root.glob("*/environment.json")):
        environment = json.loads(path.read_text())
        return facts | {key: environment.get(key) for key in ("gpu_name", "torch", "cuda", "nccl", "git_commit")}
    return facts


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, write the table. 0: every row is there and within; 1: one is not; 3: out of time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel_table", description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, default=ROOT / "train_configs" / "llama3_1b.toml", metavar="TOML")
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "parallel_table", help="of the runs")
    parser.add_argument("--out", type=Path, help="of the table, without a suffix: .json and .md (default: in --folder)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequences", type=int, default=16, help="of an optimizer step, over all ranks")
    parser.add_argument("--micro_batch", type=int, default=4, help="sequences of a rank's micro-batch; a multiple of 4")
    parser.add_argument("--only", default="", metavar="A;B", help="only these rows, beside the FSDP runs")
    parser.add_argument("--budget_s", type=float, default=float("inf"), help="seconds after which nothing runs")
    chosen = parser.parse_args(arguments)
    if chosen.micro_batch % 4 or chosen.sequences % (RANKS * chosen.micro_batch):
        parser.error(
            f"--micro_batch must be a multiple of 4, and --sequences one of {RANKS} x it: three splits are run"
        )
    if chosen.steps <= WARM_UP + 2 * PROFILED:
        parser.error(
            f"--steps must be above {WARM_UP + 2 * PROFILED}: the first {WARM_UP} and the profiled tell no speed"
        )
    names = [name for name in chosen.only.split(";") if name]
    if unknown := [name for name in names if name not in TECHNIQUES]:
        parser.error(f"--only: {unknown[0]!r} is none of {'; '.join(TECHNIQUES)}")
    runs = plan(chosen.steps, chosen.sequences, chosen.micro_batch)
    runs = {name: keys for name, keys in runs.items() if not names or name in names or name.startswith("FSDP")}
    root = chosen.folder / f"{chosen.base.stem}-{chosen.steps}steps-{chosen.sequences}x{chosen.micro_batch}"
    complete = run_all(runs, chosen.base.resolve(), root, until=time.monotonic() + chosen.budget_s)
    found = table({name: read(root / folder_name(name)) for name in runs}, chosen.steps)
    record = about(root, chosen.base, chosen.sequences, chosen.micro_batch)
    out = chosen.out or root / "parallel_table"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"about": record, **found}, indent=1) + "\n")
    out.with_suffix(".md").write_text(render(found, record))
    print(render(found, record))
    if not complete:
        return 3
    return 0 if all(row.get("within") for row in found["rows"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
