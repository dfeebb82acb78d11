"""Exact arithmetic on a model shape: parameters and FLOPs a token. Memory is in config/memory.py."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from config.flavors import ModelShape


@dataclass(frozen=True)
class Tensor:
    """``count`` parameters of one shape. ``kind``: embedding, head, linear or norm."""

    role: str
    kind: str
    shape: tuple[int, ...]
    count: int = 1
    met: tuple[int, int] = (1, 1)
    """Share of it that a token meets: (top_k, num_experts) for experts."""
    cut: int | None = None
    """Dimension that tensor parallelism cuts; None: every rank of a group holds the whole."""

    @property
    def numel(self) -> int:
        return prod(self.shape) * self.count

    @property
    def expert(self) -> bool:
        """Whether it is of routed experts, stacked along the first dimension."""
        return self.met != (1, 1)

    @property
    def active(self) -> int:
        return self.numel * self.met[0] // self.met[1]


def tensors(shape: ModelShape, held: Collection[int] | None = None) -> list[Tensor]:
    """Every parameter of the decoder, equal ones of all layers together. A tied head is not a parameter of its own.

    ``held``: indices of the layers that count; None: all.
    """
    held = range(shape.n_layers) if held is None else held
    d, hidden, layers = shape.dim, shape.hidden_dim, len(held)
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    sparse = sum(shape.moe.has_experts(i) for i in held) if shape.moe else 0
    found = [
        Tensor("embedding", "embedding", (shape.vocab_size, d), cut=0),
        Tensor("attention query", "linear", (q, d), layers, cut=0),
        Tensor("attention key, value", "linear", (kv, d), 2 * layers, cut=0),
        Tensor("attention output", "linear", (d, q), layers, cut=1),
        Tensor("feed-forward gate, up", "linear", (hidden, d), 2 * (layers - sparse), cut=0),
        Tensor("feed-forward down", "linear", (d, hidden), layers - sparse, cut=1),
        Tensor("norms of the blocks", "norm", (d,), 2 * layers),
        Tensor("final norm", "norm", (d,)),
    ]
    if shape.moe:
        moe, met = shape.moe, (shape.moe.top_k, shape.moe.num_experts)
        found += [
            Tensor("routers", "linear", (moe.num_experts, d), sparse),
            Tensor("experts gate, up", "linear", (moe.num_experts, d, 2 * moe.hidden_dim), sparse, met, cut=2),
            Tensor("experts down", "linear", (moe.num_experts, d, moe.hidden_dim), sparse, met, cut=2),
        ]
        if moe.shared_dim:
            found.append(Tensor("shared experts gate, up", "linear", (moe.shared_dim, d), 2 * sparse, cut=0))
            found.append(Tensor("shared experts down", "linear", (d, moe.shared_dim), sparse, cut=1))
    if shape.qk_norm and shape.qk_norm_scope == "projection":
        found += [Tensor("query norms", "norm", (q,), layers), Tensor("key norms", "norm", (kv,), layers)]
    elif shape.qk_norm:
        found.append(Tensor("query, key norms", "norm", (shape.head_dim,), 2 * layers))
    if not shape.enable_weight_tying:
        found.append(Tensor("head", "head", (shape.vocab_size, d), cut=0))
    return [t for t in found if t.count]


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters. A tied matrix counts once, in ``total`` and in ``embedding``."""

    total: int
    active: int
    """Parameters a token meets; below ``total`` only where a router chooses experts."""
    embedding: int
    head: int
    """The output matrix where it is a parameter of its own; 0 when tied."""
    layers: int
    """All blocks together, their norms included."""
    norms: int


def parameter_counts(shape: ModelShape) -> ParameterCounts:
    """Exact counts. Llama 3 8B: 8,030,261,248; Llama 3.2 1B, tied: 1,235,814,400."""

    def count(*kinds: str) -> int:
        return sum(t.numel for t in tensors(shape) if t.kind in kinds)

    total, embedding, head = sum(t.numel for t in tensors(shape)), count("embedding"), count("head")
    return ParameterCounts(
        total=total,
        active=sum(t.active for t in tensors(shape)),
        embedding=embedding,
        head=head,
        layers=total - embedding - head - shape.dim,
        norms=count("norm"),
    )


@dataclass(frozen=True)
class Flops:
    """Floating-point operations one token takes in forward and backward, recomputation not counted."""

    torchtitan: int
    """torchtitan 0.2.2's: 6 x (active parameters without the embedding table) + 12 x layers x heads x head_dim x
    seq_len. Attention is counted as if not causal; a tied head is not counted at all. To compare with its figures."""
    causal_with_head: int
    """Matrix products that a causal model does: 6 x (every linear weight and the head, tied or not) + 6 x layers x
    heads x head_dim x (seq_len + 1), as a query meets (seq_len + 1) / 2 keys on average. For the true utilisation."""


def flops_per_token(shape: ModelShape, seq_len: int) -> Flops:
    """Both formulas for a sequence of ``seq_len`` tokens. With a document mask the true work is less still."""
    counts = parameter_counts(shape)
    width = shape.n_layers * shape.n_heads * shape.head_dim
    linear = sum(t.active for t in tensors(shape) if t.kind == "linear")
    return Flops(
        torchtitan=6 * (counts.active - counts.embedding) + 12 * width * seq_len,
        causal_with_head=6 * (linear + shape.vocab_size * shape.dim) + 6 * width * (seq_len + 1),
    )
