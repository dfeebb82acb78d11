"""What a flavor is made of: the shape of a decoder and of its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1 frequency scaling: long wavelengths are stretched by ``factor`` (Llama 3 report, section 3.4)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True)
class MoEShape:
    """What decides the experts of a model and what its routing weights mean. Field names are those of ``[moe]``."""

    num_experts: int
    top_k: int
    hidden_dim: int
    num_shared_experts: int = 0
    first_dense_layers: int = 0
    every_n_layers: int = 1
    score_func: Literal["softmax", "sigmoid"] = "softmax"
    route_norm: bool = False
    route_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    initial_skew: float = 0.0

    @property
    def shared_dim(self) -> int:
        """Width of the feed-forward layer that the shared experts form; 0 without any."""
        return self.num_shared_experts * self.hidden_dim

    def has_experts(self, layer: int) -> bool:
        """Whether the block of this index, counted from 0 at the bottom, has experts."""
        return layer >= self.first_dense_layers and (layer + 1) % self.every_n_layers == 0


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides the parameters of a decoder. Field names: ``[model]``'s; in ``moe``: ``[moe]``'s."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    max_seq_len: int
    head_dim: int = 0  # 0: dim / n_heads, filled in by __post_init__
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    qk_norm: bool = False
    enable_weight_tying: bool = False
    qk_norm_scope: Literal["head", "projection"] = "head"  # what one RMSNorm of a query or key spans
    moe: MoEShape | None = None

    def __post_init__(self) -> None:
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)
