"""Run directories as the trainer leaves them, with known effects and known noise. Used by the tests of the
comparison.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tomli_w

BASE_CONFIG: dict[str, Any] = {
    "training.steps": 60,
    "training.seq_len": 128,
    "training.global_batch_size": 16,
    "training.local_batch_size": 8,
    "lr_scheduler.warmup_steps": 10,
    "optimizer.name": "AdamW",
    "optimizer.lr": 8e-4,
    "validation.enable": True,
    "validation.freq": 10,
    "compile.enable": False,
}

QUESTION: dict[str, Any] = {
    "question": "Which weight decay learns best at this size?",
    "hypothesis": "0.1 is not beaten",
    "variable": "optimizer.weight_decay",
    "baseline": "wd_0.1",
    "references": [],
    "expected": "loss-changing",
    "seeds": [1, 2, 3],
    "aa": True,
    "decide": {"metric": "validation_metrics/loss", "step": 60, "equivalent_within": 0.005},
}

ENVIRONMENT: dict[str, Any] = {
    "hostname_hash": "5b1f0c77aa12", "gpu_name": "Example GPU", "gpu_count": 1, "driver": "1.0", "python": "3.11.9",
    "torch": "2.13.0", "cuda": "13.0", "nccl": "2.27", "torchtitan": "0.3.0", "cpu": "Example CPU", "cores": 8,
    "ram_gib": 64, "os": "Linux", "env": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "git_commit": "a" * 40,
    "git_dirty": False, "deterministic": False, "matmul_precision": "highest",
    "clocks": {"sm_mhz": 1980, "throttled": []},
}  # fmt: skip


@dataclass
class Arm:
    """An arm's planted truth: ``loss`` is added to the final validation loss, ``speed`` multiplies tokens a
    second.
    """

    config: dict[str, Any] = field(default_factory=dict)
    loss: float = 0.0
    speed: float = 1.0
    memory: float = 0.0


@dataclass
class Noise:
    """Standard deviations: of a seed's luck (shared by all arms), of an arm's own luck, of a run's log speed, of a
    step.
    """

    seed: float = 0.010
    arm: float = 0.0015
    speed: float = 0.004
    step: float = 0.01


Change = Callable[[dict[str, Any]], None]


def write_run(
    path: Path,
    *,
    name: str = "",
    arm: str = "",
    truth: Arm | None = None,
    seed: int = 1,
    gpus: int = 1,
    noise: Noise | None = None,
    question: dict[str, Any] | None = None,
    order: int = 0,
    repeat: int = 0,
    tune: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    record: dict[str, Any] | None = None,
    state: str = "DONE",
    change_line: Change | None = None,
) -> Path:
    """Write one run directory. ``order`` is its place in time (minutes); ``change_line`` may tamper with each
    metrics line.
    """
    truth, noise = truth or Arm(), noise or Noise()
    shared = random.Random(f"data {seed}")
    own = random.Random(f"{name} {arm} {seed} {repeat} {gpus} {tune}")
    luck = random.Random(f"{name} {arm} {seed} {gpus} {tune}")
    config = (
        BASE_CONFIG
        | truth.config
        | (tune or {})
        | {"debug.seed": seed, "debug.init_seed": seed, "debug.data_seed": seed}
    )
    tokens_per_step = config["training.global_batch_size"] * config["training.seq_len"]
    offset = truth.loss + shared.gauss(0, noise.seed) + luck.gauss(0, noise.arm)
    step_s = 0.1 * tokens_per_step / 2048 / truth.speed * math.exp(own.gauss(0, noise.speed)) / gpus
    steps, freq = config["training.steps"], 10
    started = datetime(2026, 11, 2, 8, 0, tzinfo=UTC) + timedelta(minutes=order)

    lines, wall, pending = [], 8.0, []
    for step in range(steps + 1):
        if step:
            wobble = math.exp(abs(own.gauss(0, noise.step)))
            pending.append(step_s * wobble + (7.5 if step <= 3 else 0.4 if step % freq == 0 else 0.0))
            wall += pending[-1]
        if step % 5 and step != steps:
            continue
        progress = step / steps
        clean = 3.0 + 5.3 * math.exp(-5.0 * progress) + offset * progress
        line: dict[str, Any] = {"step": step, "tokens": step * tokens_per_step, "wall_s": wall}
        if step:
            line |= {
                "loss_metrics/global_avg_loss": clean + shared.gauss(0, 0.02),
                "loss_metrics/global_max_loss": clean + 0.2,
                "grad_norm": 1.0 + abs(own.gauss(0, 0.2)),
                "lr": config["optimizer.lr"],
                "throughput(tps)": tokens_per_step / step_s / gpus,
                "tflops": 300.0 * truth.speed,
                "mfu(%)": 31.0 * truth.speed,
                "time_metrics/end_to_end(s)": step_s,
                "time_metrics/data_loading(s)": 0.001,
                "time_metrics/data_loading(%)": 1.0,
                "memory/max_active(GiB)": 11.5 + truth.memory,
                "memory/max_reserved(GiB)": 13.0 + truth.memory,
                "memory/num_alloc_retries": 0,
                "memory/num_ooms": 0,
                "step_times_s": pending,
                "excluded_steps": [s for s in range(step - len(pending) + 1, step + 1) if s <= 3 or s % freq == 0],
            }
            pending = []
        if step % freq == 0:
            loss = clean + 0.05
            line |= {"validation_metrics/loss": loss, "validation_metrics/perplexity": math.exp(loss)}
            line["validation_metrics/bits_per_byte"] = loss / math.log(2) / 3.6
        if change_line:
            change_line(line)
        lines.append(line)

    nested: dict[str, Any] = {}
    for key, value in config.items():
        section, _, leaf = key.partition(".")
        nested.setdefault(section, {})[leaf] = value
    entry = {"name": name, "arm": arm, "file": f"{name}.toml", "tune": tune, "question": question}
    run_record = {
        "schema": 1,
        "command": ["torchrun", f"--nproc_per_node={gpus}", "train.py", "--job.config_file", f"{name or 'run'}.toml",
                    "--ablation.arm", arm, "--debug.seed", str(seed), "--job.run_dir", str(path),
                    *(word for key, value in (tune or {}).items() for word in (f"--{key}", str(value)))],
        "started": started.isoformat(), "config_file": f"{name}.toml", "origins": {}, "base_diff": {},
        "ablation": entry if name else None,
        "corpus_hash": "c0ffee" * 8, "tokenizer": {"kind": "bpe", "vocab_size": 4096, "fingerprint": "feed" * 8},
        "parameters": {"total": 1_200_000, "active": 1_200_000}, "tokens_per_step": tokens_per_step, "world_size": gpus,
        "flops_per_token": {"torchtitan": 7.2e6, "causal_with_head": 8.1e6}, "mesh": {"dp_shard": gpus},
        "derived": {"gradient_accumulation_steps": config["training.global_batch_size"] // (8 * gpus) or 1,
                    "data_parallel_degree": gpus},
        "seeds": {"init_seed": seed, "data_seed": seed}, "warnings": [], "attention_backend": "sdpa",
    }  # fmt: skip
    path.mkdir(parents=True)
    (path / "config.toml").write_text(tomli_w.dumps(nested))
    (path / "run.json").write_text(json.dumps(run_record | (record or {})))
    (path / "environment.json").write_text(json.dumps(ENVIRONMENT | (environment or {})))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if state:
        ended = {"finished": (started + timedelta(seconds=wall)).isoformat(), "steps": steps, "reason": ""}
        if state == "FAILED":
            ended["reason"] = "out of memory at step 60"
        (path / state).write_text(json.dumps(ended | ({"skipped_steps": 0} if state == "DONE" else {})))
    return path


def write_ablation(
    root: Path,
    arms: dict[str, Arm],
    *,
    name: str = "weight_decay",
    question: dict[str, Any] | None = None,
    gpus: int = 1,
    noise: Noise | None = None,
    first_minute: int = 0,
    **run_options: Any,
) -> Path:
    """``root/name/<arm>/seed<k>-<n>gpu``: every arm on every seed in ABBA order, and the A/A runs if ``aa`` is
    true.
    """
    asked = QUESTION | (question or {})
    names, baseline = list(arms), asked["baseline"]
    tasks: list[tuple[str, int, int]] = []
    for index, seed in enumerate(asked["seeds"]):
        tasks += [(arm, seed, 0) for arm in (names if index % 2 == 0 else reversed(names))]
        if asked["aa"]:
            tasks += [(baseline, max(asked["seeds"]) + 1 + index, 0), (baseline, seed, 1)]
    for order, (arm, seed, repeat) in enumerate(tasks):
        folder = f"seed{seed}-{gpus}gpu" + (f"-repeat{repeat}" if repeat else "")
        write_run(
            root / name / arm / folder, name=name, arm=arm, truth=arms[arm], seed=seed, gpus=gpus, noise=noise,
            question=asked, order=first_minute + order, repeat=repeat, **run_options,
        )  # fmt: skip
    return root / name


def three_arms() -> dict[str, Arm]:
    """A baseline, one arm that learns better and runs slower, one that is the same but for noise."""
    return {
        "wd_0.1": Arm({"optimizer.weight_decay": 0.1}),
        "wd_0.01": Arm({"optimizer.weight_decay": 0.01}, loss=-0.03, speed=0.97, memory=0.4),
        "wd_0.2": Arm({"optimizer.weight_decay": 0.2}),
    }
