"""What autograd keeps of a Transformer block for its backward pass, in bytes a token: a count of the model's tensors.

The counts follow model/decoder.py, attention.py, feed_forward.py and experts_*.py, operator by operator. They are
first principles; config/estimate.py scales them by what a GPU showed.
"""

from __future__ import annotations

from dataclasses import dataclass

from config.shapes import ModelShape


@dataclass(frozen=True)
class Numbers:
    """Bytes of a number, and over how many ranks a block's numbers are divided."""

    compute: int
    """In the dtype of compute, between blocks too."""
    tensor: int = 1
    """Tensor-parallel ranks; between blocks they hold shares of the sequence."""


@dataclass(frozen=True)
class Kernels:
    """What a block runs that changes what it keeps."""

    scores: int = 0
    """Keys a query meets, where the attention kernel keeps every score; 0 where it keeps none."""
    opaque_swiglu: bool = False
    """silu(gate) x up as one kernel: it keeps both operands, and not silu(gate)."""


@dataclass(frozen=True)
class Block:
    """Bytes a token of one block."""

    boundary: float
    """Its input, which every mode keeps."""
    eager: float
    """All that plain autograd keeps, the input included."""
    compiled: float
    """What the compiler's partition keeps: all inputs of products and of the attention kernel, silu(gate) not."""
    operators: float
    """With every second matrix product and the attention kernel kept (selective "op"); of experts nothing."""
    unread: float
    """Of these, results of products that no backward pass reads: a compiler drops them."""
    experts: float
    """Of ``eager`` and ``compiled``, what experts keep: the same in every mode that does not recompute them."""
    working: float
    """Gradients of activations while the block is in its backward pass."""


def block(shape: ModelShape, numbers: Numbers, kernels: Kernels, *, with_experts: bool) -> Block:
    """Of one block of ``shape``, dense or with routed experts (``with_experts``)."""
    c, t = numbers.compute, numbers.tensor
    d, heads = shape.dim, shape.n_heads / t
    q, kv = heads * shape.head_dim, shape.n_kv_heads * shape.head_dim / t
    boundary, normed = c * d / t, c * d
    kernel = c * (2 * q + 2 * kv) + 4 * heads  # q, k, v, output and one float32 a head
    scores = 6 * heads * kernels.scores
    scales = 4 * 2 + (4 * (heads + shape.n_kv_heads / t) if shape.qk_norm else 0)  # one float32 a norm
    norms = c * (q + kv) if shape.qk_norm else 0
    product = c * d / t  # the output projection's result, which the norm after it reads again
    eager = boundary + normed + kernel + scores + norms + scales + boundary
    compiled = boundary + 2 * normed + kernel + scores + norms + scales + product
    unread = 0.0
    operators = boundary + c * (2 * q + kv) + 4 * heads + scores  # results of wq and wv, and of attention
    working = 2 * boundary + c * (2 * q + 2 * kv) + 2 * scores
    widths = [shape.hidden_dim / t]
    if with_experts:
        assert shape.moe is not None
        widths = [shape.moe.shared_dim / t] if shape.moe.shared_dim else []
    for h in widths:
        eager += c * d + (3 if kernels.opaque_swiglu else 4) * c * h
        compiled += 3 * c * h
        operators += c * h + product  # results of w1 and w2
        unread += product
        working += 3 * c * h
    if not with_experts:
        return Block(boundary, eager, compiled, operators, unread, 0.0, working)
    moe = shape.moe
    assert moe is not None
    k, hidden = moe.top_k, moe.hidden_dim / t
    router = 3 * 4 * moe.num_experts + (4 * d if c != 4 else 0)  # scores and their shares; its float32 input
    experts = c * d + 2 * c * hidden * k + (4 + 3 * 8) * k  # input, pre-activations, weights and three indices
    rows = k * c * (2 * d + 4 * hidden)  # gathered inputs and gradients, gradients of both products
    return Block(
        boundary,
        eager + router + experts,
        compiled + router + experts,
        operators + c * d,
        unread,
        experts,
        working + rows,
    )


def share_within_budget(budget: float, kept: float, casts: float) -> float:
    """Share of ``kept`` bytes, what a graph saves for speed beside its inputs, that torch's partitioner lets it save.

    It measures between the graph's inputs and all that is saved for speed. Under autocast the weights are inputs of 4
    bytes an element, of which for speed a cast of 2 is saved: the room between is smaller by the bytes of ``casts``,
    and no cast is saved below budget 1. Without room a budget changes nothing (torch 2.11 and 2.13,
    torch/_functorch/partitioners.py, choose_saved_values_set).
    """
    room = kept - casts
    if budget in (0, 1):
        return budget
    return budget * room / kept if room > 0 else 1.0
