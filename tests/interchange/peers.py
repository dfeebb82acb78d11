"""Tiny models of transformers with random weights, one of each family and of each option that we read."""

from pathlib import Path
from typing import Any

import torch
import transformers

_SIZE = {
    "vocab_size": 288, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 16_384, "rms_norm_eps": 1e-5, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}

PEERS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama, scaled rope, tied": (transformers.LlamaConfig, {"rope_parameters": _SCALED, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3, tied": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
}


def peer(name: str) -> torch.nn.Module:
    """A model in float32 whose every weight is random, norms too; eager attention."""
    kind, options = PEERS[name]
    model = transformers.AutoModelForCausalLM.from_config(kind(**_SIZE, **options), attn_implementation="eager").float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
    return model.eval()


def saved_peer(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
    """:func:`peer` in ``dtype``, written to ``folder`` by transformers."""
    model = peer(name).to(dtype)
    model.save_pretrained(folder, **options)
    return model
