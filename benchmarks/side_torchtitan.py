"""torchtitan 0.2.2's side: its own trainer in an environment of its own, and its own log lines."""

from __future__ import annotations

import re
from importlib.metadata import distributions
from typing import Any

from benchmarks.inputs import text_and_tokenizer
from benchmarks.side import ROOT, WINDOW, Job, RunFailed, Setting, execute, shown, torchrun, without_colours

VERSION = "0.2.2"

_STEP = re.compile(
    r"step:\s*(\d+)\s+loss:\s*(\S+).*?memory:\s*([\d.]+)GiB.*?tps:\s*([\d,]+)\s+tflops:\s*([\d,.]+)\s+mfu:\s*([\d.]+)%"
)


class Torchtitan:
    """Without a word: compiled blocks, selective checkpointing by operator, as its own Llama 3 8B file has it.

    Args:
        path: folder that holds torchtitan 0.2.2; None: none was named.
    """

    name = "torchtitan"
    words: dict[str, tuple[str, ...]] = {
        "none": ("--activation_checkpoint.mode", "none"),
        "full": ("--activation_checkpoint.mode", "full"),
        "eager": (),  # without --compile.enable
        "ep2": ("--parallelism.expert_parallel_degree", "2"),
        "float8": (  # tensorwise, with weights gathered in float8: its fastest
            "--model.converters",
            "quantize.linear.float8",
            "--quantize.linear.float8.enable_fsdp_float8_all_gather",
            "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
            "--quantize.linear.float8.filter_fqns",
            "output",
        ),
    }

    def __init__(self, path: str | None):
        self._path = path

    def missing(self) -> str | None:
        remedy = f"pip install --target DIR --no-deps torchtitan=={VERSION}, then --peer_path DIR"
        if self._path is None:
            return f"torchtitan: no --peer_path ({remedy})"
        found = [d.version for d in distributions(name="torchtitan", path=[self._path])]
        if found != [VERSION]:
            there = ", ".join(found) or "none"
            return f"torchtitan: {VERSION} is compared with, --peer_path {self._path} holds {there} ({remedy})"
        return None

    def title(self) -> str:
        return f"torchtitan {VERSION}"

    def notes(self, job: Job) -> list[str]:
        notes = ["torchtitan reads the same text and tokenizer in its own order and draws its own weights"]
        if job.ngpu == 1:
            notes.append("torchtitan: one GPU computes under autocast; it applies fully_shard from two ranks on")
        if job.shape.moe:
            notes.append("torchtitan balances by its bias alone (load_balance_coeff 1e-3, its default)")
        return notes

    def run(self, job: Job, setting: Setting) -> dict[str, Any]:
        assert job.workload.torchtitan is not None and self._path is not None
        model, flavor = job.workload.torchtitan
        optimizer, training = job.config.optimizer, job.config.training
        words = [option for word in setting.words for option in self.words[word]]
        if "eager" not in setting.words:
            words.append("--compile.enable")
        if not {"none", "full"} & set(setting.words):
            words += ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]
        command = [
            *torchrun(job.ngpu), "--local-ranks-filter", "0", "--role", "rank", "--tee", "3",
            str(ROOT / "benchmarks/torchtitan_peer.py"), "--model.name", model, "--model.flavor", flavor,
            "--model.hf_assets_path", "tests/assets/tokenizer", "--training.dataset", "c4_test",
            "--training.steps", str(job.steps), "--training.seq_len", str(training.seq_len),
            "--training.local_batch_size", str(setting.batch),
            "--training.global_batch_size", str(job.workload.sequences * job.ngpu),
            "--training.max_norm", str(training.max_norm),
            "--optimizer.lr", str(optimizer.lr), "--optimizer.weight_decay", str(optimizer.weight_decay),
            "--lr_scheduler.warmup_steps", str(job.config.lr_scheduler.warmup_steps),
            "--metrics.log_freq", str(WINDOW), "--debug.seed", "0", *words,
        ]  # fmt: skip
        log = execute(command, text_and_tokenizer(job), job.limit_s, python_path=self._path)
        found = parse_log(log)
        timed = [line for line in found if line["step"] > job.workload.warm_up and line["step"] % WINDOW == 0]
        if len(timed) != (job.steps - job.workload.warm_up) // WINDOW:
            raise RunFailed(f"{len(timed)} windows of {WINDOW} steps in the log of {job.steps} steps", command, log)
        return {
            "command": shown(command),
            "step_times_s": None,
            "window_tokens_per_s": [line["tokens_per_s"] for line in timed],
            "reported_tflops": [line["tflops"] for line in timed],
            "losses": {line["step"]: line["loss"] for line in found},
            "reserved_gib": max(line["reserved_gib"] for line in found),
            "log_tail": log[-1500:],
        }


def parse_log(log: str) -> list[dict[str, Any]]:
    """torchtitan's metric lines: step, loss (nats), reserved_gib (peak), tokens_per_s (a GPU), tflops (its formula)."""
    found = []
    for line in without_colours(log).splitlines():
        match = _STEP.search(line)
        if match:
            step, loss, memory, tps, tflops, _ = (group.replace(",", "") for group in match.groups())
            found.append(
                {
                    "step": int(step),
                    "loss": float(loss),
                    "reserved_gib": float(memory),
                    "tokens_per_s": float(tps),
                    "tflops": float(tflops),
                }
            )
    return found
