"""transformers' side: its model classes under FSDP2, trained by benchmarks/transformers_peer.py on our very tokens."""

from __future__ import annotations

import importlib.metadata
import json
import time
from typing import Any

from benchmarks.inputs import token_file
from benchmarks.side import ROOT, Job, RunFailed, Setting, execute, shown, torchrun
from config.shapes import ModelShape
from trainer.schedule import learning_rate_factor

RESULT = "transformers_peer: "
"""What the script's line with the measurements begins with."""


class Transformers:
    """Without a word: eager, SDPA attention, no activation checkpointing."""

    name = "transformers"
    words: dict[str, tuple[str, ...]] = {
        "compile": ("compile",),
        "full": ("checkpoint",),
        "flash": ("flash_attention_2",),
    }

    def _version(self) -> str | None:
        try:
            return importlib.metadata.version("transformers")
        except importlib.metadata.PackageNotFoundError:
            return None

    def missing(self) -> str | None:
        version = self._version()
        if version is None or int(version.split(".")[0]) < 5:
            found = f"found {version}" if version else "not installed"
            return f'transformers: 5.0 or newer is compared with, {found} (pip install "transformers>=5")'
        return None

    def title(self) -> str:
        return f"transformers {self._version()}"

    def notes(self, job: Job) -> list[str]:
        notes = ["transformers trains on our tokens, from weights of our standard deviations with a draw of their own"]
        if job.ngpu == 1:
            notes.append("transformers: fully_shard over one rank")
        if job.shape.moe:
            notes.append("transformers: OLMoE, query and key norms over the projection, no balance loss (its default)")
        return notes

    def run(self, job: Job, setting: Setting) -> dict[str, Any]:
        path = job.work / f"transformers-{time.time_ns()}.json"
        path.write_text(json.dumps(specification(job, setting, str(token_file(job)))), encoding="utf-8")
        command = [*torchrun(job.ngpu), "benchmarks/transformers_peer.py", str(path)]
        log = execute(command, ROOT, job.limit_s)
        lines = [line for line in log.splitlines() if line.startswith(RESULT)]
        if not lines:
            raise RunFailed("no line with measurements", command, log)
        result = json.loads(lines[-1].removeprefix(RESULT))
        tail = "\n".join(line for line in log.splitlines() if not line.startswith(RESULT))
        return {"command": shown(command), **result, "log_tail": tail[-1500:]}


def specification(job: Job, setting: Setting, tokens: str) -> dict[str, Any]:
    """What benchmarks/transformers_peer.py is to do, as JSON."""
    optimizer, schedule, training = job.config.optimizer, job.config.lr_scheduler, job.config.training
    return {
        "tokens": tokens,
        "family": "olmoe" if job.shape.moe else "llama",
        "config": hf_config(job.shape, training.seq_len),
        "attention": "flash_attention_2" if "flash" in setting.words else "sdpa",
        "compile": "compile" in setting.words,
        "checkpoint": "full" in setting.words,
        "dtype": training.mixed_precision_param,
        "batch": setting.batch,
        "accumulation": job.accumulation(setting),
        "learning_rates": [optimizer.lr * learning_rate_factor(step, schedule, job.steps) for step in range(job.steps)],
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_norm": training.max_norm,
        "seed": job.config.debug.seed,
        "device": job.device,
    }


def hf_config(shape: ModelShape, seq_len: int) -> dict[str, Any]:
    """Arguments of LlamaConfig or OlmoeConfig for ``shape``."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        scaling = shape.rope_scaling
        rope = {
            "rope_type": "llama3",
            "rope_theta": shape.rope_theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    config = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "max_position_embeddings": max(shape.max_seq_len, seq_len),
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": shape.enable_weight_tying,
        "use_cache": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if shape.moe is None:
        return config | {"head_dim": shape.head_dim}
    return config | {
        "intermediate_size": shape.moe.hidden_dim,
        "num_experts": shape.moe.num_experts,
        "num_experts_per_tok": shape.moe.top_k,
        "norm_topk_prob": shape.moe.route_norm,
        "output_router_logits": False,
    }
