"""What run.json holds beyond the configuration and where its values came from."""

from __future__ import annotations

from typing import Any

from config.arithmetic import flops_per_token, parameter_counts
from config.attention import Choice
from config.flavors import resolve_shape
from config.load import Resolved
from config.seeds import seeds
from config.world import derived


def describe_run(
    resolved: Resolved,
    mesh: dict[str, int],
    data: dict[str, Any],
    world_size: int,
    *,
    device: str,
    attention: Choice,
) -> dict[str, Any]:
    """Key of run.json -> JSON value.

    Args:
        mesh: axis -> degree.
        data: of ``DataPipeline.describe``.
        device: "cpu" or "cuda".
        attention: the kernel of the run.
    """
    config = resolved.config
    shape = resolve_shape(config.model, config.moe)
    flops, counts = flops_per_token(shape, config.training.seq_len), parameter_counts(shape)
    numbers = {name: item.value for name, item in derived(config, world_size).items()}
    return {
        "world_size": world_size,
        "mesh": mesh,
        "device": device,
        "derived": numbers,
        "seeds": seeds(config),
        "tokens_per_step": numbers["tokens_per_step"],
        "parameters": {"total": counts.total, "active": counts.active},
        "flops_per_token": {"torchtitan": flops.torchtitan, "causal_with_head": flops.causal_with_head},
        "corpus_hash": data["corpus_hash"],
        "tokenizer": data["tokenizer"],
        "data": data,
        "attention_backend": attention.name,
        "warnings": [*resolved.notes, *attention.notes(), *data["warnings"]],
    }
