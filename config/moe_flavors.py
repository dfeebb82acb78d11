"""Mixture-of-experts shapes as data, each with a dense shape of equal active parameters: ``<name>_dense``.

A dense twin differs from its MoE in the feed-forward layers alone: their width is that of the experts a token meets, so
the active parameters agree up to the router (below one per cent). Total and active counts are the published ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from config.shapes import ModelShape, MoEShape

_EXPERTS: dict[str, ModelShape] = {
    # 8 experts, 2 of them active: trains on two CPU cores.
    "debug_moe": ModelShape(
        vocab_size=4096,
        dim=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        hidden_dim=384,
        max_seq_len=2048,
        moe=MoEShape(num_experts=8, top_k=2, hidden_dim=192),
    ),
    # The benchmark shape: 6.84 B total, 1.21 B active.
    "moe_7b_a1b": ModelShape(
        vocab_size=32_000,
        dim=2048,
        n_layers=16,
        n_heads=16,
        n_kv_heads=16,
        hidden_dim=8192,
        max_seq_len=4096,
        qk_norm=True,
        moe=MoEShape(num_experts=64, top_k=8, hidden_dim=1024),
    ),
    # arXiv 2409.02060: 6.92 B total, 1.28 B active.
    "OLMoE-1B-7B": ModelShape(
        vocab_size=50_304,
        dim=2048,
        n_layers=16,
        n_heads=16,
        n_kv_heads=16,
        hidden_dim=8192,
        max_seq_len=4096,
        rope_theta=10_000.0,
        qk_norm=True,
        qk_norm_scope="projection",
        moe=MoEShape(num_experts=64, top_k=8, hidden_dim=1024),
    ),
    # arXiv 2401.04088: 46.70 B total, 12.88 B active.
    "Mixtral-8x7B": ModelShape(
        vocab_size=32_000,
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        hidden_dim=28_672,
        max_seq_len=32_768,
        rope_theta=1_000_000.0,
        moe=MoEShape(num_experts=8, top_k=2, hidden_dim=14_336, route_norm=True),
    ),
    # arXiv 2505.09388: 30.53 B total, 3.35 B active.
    "Qwen3-30B-A3B": ModelShape(
        vocab_size=151_936,
        dim=2048,
        n_layers=48,
        n_heads=32,
        n_kv_heads=4,
        head_dim=128,
        hidden_dim=6144,
        max_seq_len=40_960,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qk_norm=True,
        moe=MoEShape(num_experts=128, top_k=8, hidden_dim=768, route_norm=True),
    ),
    # arXiv 2505.09388: 235.09 B total, 22.19 B active.
    "Qwen3-235B-A22B": ModelShape(
        vocab_size=151_936,
        dim=4096,
        n_layers=94,
        n_heads=64,
        n_kv_heads=4,
        head_dim=128,
        hidden_dim=12_288,
        max_seq_len=40_960,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qk_norm=True,
        moe=MoEShape(num_experts=128, top_k=8, hidden_dim=1536, route_norm=True),
    ),
    # The experts of DeepSeek-V2-Lite, routed as DeepSeek-V3 (arXiv 2412.19437): sigmoid, bias, groups, shared experts.
    # The attention is that of Llama, not multi-head latent attention, so counts are not the published 15.7 B / 2.4 B.
    "DeepSeek-V3-16B": ModelShape(
        vocab_size=102_400,
        dim=2048,
        n_layers=27,
        n_heads=16,
        n_kv_heads=16,
        hidden_dim=10_944,
        max_seq_len=4096,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        moe=MoEShape(
            num_experts=64,
            top_k=6,
            hidden_dim=1408,
            num_shared_experts=2,
            first_dense_layers=1,
            score_func="sigmoid",
            route_norm=True,
            route_scale=2.5,
            num_groups=8,
            top_groups=4,
        ),
    ),
}


def _dense_twin(shape: ModelShape) -> ModelShape:
    """``shape`` without experts, as wide in every block as its blocks are on average for a token, in steps of 64."""
    moe = shape.moe
    assert moe is not None
    with_experts = sum(moe.has_experts(layer) for layer in range(shape.n_layers))
    active = with_experts * (moe.top_k * moe.hidden_dim + moe.shared_dim)
    width = (active + (shape.n_layers - with_experts) * shape.hidden_dim) / shape.n_layers
    return replace(shape, moe=None, hidden_dim=64 * round(width / 64))


def _debug(**changes: Any) -> ModelShape:
    """debug_moe with other experts, of the same total and active width."""
    shape = _EXPERTS["debug_moe"]
    assert shape.moe is not None
    return replace(shape, moe=replace(shape.moe, **changes))


_EXPERTS |= {
    "debug_moe_16x96": _debug(num_experts=16, top_k=4, hidden_dim=96),
    "debug_moe_32x48": _debug(num_experts=32, top_k=8, hidden_dim=48),
    "debug_moe_shared": _debug(num_experts=7, top_k=1, num_shared_experts=1),
}

MOE: dict[str, ModelShape] = _EXPERTS | {f"{name}_dense": _dense_twin(shape) for name, shape in _EXPERTS.items()}
