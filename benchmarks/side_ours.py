"""Our side: train.py, and what its run directory says; and our side again under another setting."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.run_files import metrics_lines
from benchmarks.side import ROOT, WINDOW, Job, RunFailed, Setting, execute, shown, torchrun


class Ours:
    """This trainer. Without a word the workload's TOML decides."""

    name = "ours"
    words: dict[str, tuple[str, ...]] = {
        "none": ("--activation_checkpoint.mode", "none"),
        "op": ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"),
        "full": ("--activation_checkpoint.mode", "full"),
        "eager": ("--compile.enable", "false"),
        "direct": ("--parallelism.fsdp_collectives", "direct"),
        "ep2": ("--parallelism.expert_parallel_degree", "2"),
        "dedup": ("--moe.dispatcher", "all_to_all_dedup"),
        "overlap": ("--moe.comm_overlap", "experts"),
        "uniform": ("--moe.balance", "forced_uniform"),
        "skew": ("--moe.balance", "forced_skew"),
        "float8": (
            "--model.converters", '["quantize.linear.float8"]',
            "--quantize.linear.float8.enable_fsdp_float8_all_gather", "true",
            "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp", "true",
        ),
        "float8_experts": (
            "--model.converters", '["quantize.grouped_mm.float8"]', "--quantize.grouped_mm.float8.fqns", '["experts"]',
        ),
    }  # fmt: skip

    def missing(self) -> str | None:
        return None

    def title(self) -> str:
        return "ours"

    def notes(self, job: Job) -> list[str]:
        notes = ["ours: one GPU computes under autocast, without FSDP2"] if job.ngpu == 1 else []
        if job.shape.moe:
            moe = job.config.moe
            notes.append(
                f"ours balances by {moe.balance} ({moe.bias_update_rate:g}), a sequence loss"
                f" ({moe.extra_sequence_coeff:g}) and a z loss ({moe.z_loss_coeff:g})"
            )
        return notes

    def run(self, job: Job, setting: Setting) -> dict[str, Any]:
        run_dir = job.work / f"ours-{time.time_ns()}"
        words = [option for word in setting.words for option in self.words[word]]
        command = [
            *torchrun(job.ngpu), "train.py", "--job.config_file", job.workload.config, "--job.run_dir", str(run_dir),
            "--training.steps", str(job.steps), "--training.local_batch_size", str(setting.batch),
            "--training.global_batch_size", str(job.workload.sequences * job.ngpu),
            "--metrics.log_freq", str(WINDOW), *words, *job.ours_options,
        ]  # fmt: skip
        log = execute(command, ROOT, job.limit_s)
        lines = [line for line in metrics_lines(run_dir) if "step_times_s" in line]
        times = [seconds for line in lines for seconds in line["step_times_s"]]
        if len(times) != job.steps:
            raise RunFailed(f"{len(times)} of {job.steps} steps in metrics.jsonl", command, log)
        return {
            "command": shown(command),
            "step_times_s": times,
            "excluded_steps": sorted({step for line in lines for step in line["excluded_steps"]}),
            "losses": {line["step"]: line["loss_metrics/global_avg_loss"] for line in lines},
            "max_violation": lines[-1].get("moe/max_violation"),  # MaxVio of the last log step; None: no experts
            # A machine without a GPU has no such tag.
            "reserved_gib": max((line.get("memory/max_reserved(GiB)", 0.0) for line in lines), default=0.0) or None,
            "log_tail": log[-1500:],
        }


class Arm(Ours):
    """Ours under another setting, in the place of a peer: what a setting costs or gains in the same session."""

    name = "arm"

    def title(self) -> str:
        return "ours, another setting"

    def notes(self, job: Job) -> list[str]:
        return []
