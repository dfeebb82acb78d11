"""A Llama-3 style decoder (arXiv 2407.21783): pre-norm blocks of grouped-query attention and SwiGLU, or experts.

Parameter names are torchtitan's. Blocks are kept in a dictionary under their global index, so that a part of the model
(a pipeline stage: ``tok_embeddings``, ``norm`` or ``output`` None, fewer layers) keeps the names of the whole.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from config.flavors import ModelShape
from config.schema import Moe
from model.attention import Attention, AttentionBackend
from model.balance import Observation, balances
from model.compute_dtype import RMSNorm, compute_dtype
from model.feed_forward import FeedForward
from model.head import Head
from model.loss import HeadLoss
from model.moe import MoE
from model.rope import rope_frequencies, rope_table


class Block(nn.Module):
    """One Transformer block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, shape: ModelShape, backend: AttentionBackend):
        super().__init__()
        self.attention = Attention(shape, backend)
        self.feed_forward = FeedForward(shape.dim, shape.hidden_dim)
        self.attention_norm = RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn_norm = RMSNorm(shape.dim, eps=shape.norm_eps)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, mask: Any) -> torch.Tensor:
        """(B, S, dim) -> (B, S, dim)."""
        x = x + self.attention(self.attention_norm(x), rope, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class MoEBlock(nn.Module):
    """A Transformer block whose feed-forward layer is a mixture of experts."""

    def __init__(self, shape: ModelShape, backend: AttentionBackend, moe: Moe, noise_seed: int, layer: int):
        super().__init__()
        self.attention = Attention(shape, backend)
        self.moe = MoE(shape, moe, noise_seed, layer)
        self.attention_norm = RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn_norm = RMSNorm(shape.dim, eps=shape.norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor,
        mask: Any,
        numbers: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Observation]:
        """(B, S, dim) -> (B, S, dim), and what the layer saw; ``numbers`` and ``seen`` as in
        :meth:`model.moe.MoE.forward`.
        """
        x = x + self.attention(self.attention_norm(x), rope, mask)
        out, observation = self.moe(self.ffn_norm(x), numbers, seen)
        return x + out, observation


class Decoder(nn.Module):
    """Token ids in, logits out.

    Args:
        shape: the model's shape.
        backend: attention kernel of every block.
        max_positions: rows of the rotary table, the longest sequence this instance will see.
        moe: the [moe] section, for a shape with experts.
        noise_seed: of routing noise.
        loss: of the head. None: all logits and torch's cross entropy.
    """

    def __init__(
        self,
        shape: ModelShape,
        backend: AttentionBackend,
        max_positions: int,
        moe: Moe | None = None,
        noise_seed: int = 0,
        loss: HeadLoss | None = None,
    ):
        super().__init__()
        self.shape = shape
        self.backend = backend
        self.max_positions = max_positions
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleDict()
        for i in range(shape.n_layers):
            with_experts = shape.moe is not None and shape.moe.has_experts(i)
            self.layers[str(i)] = (
                MoEBlock(shape, backend, moe or Moe(), noise_seed, i) if with_experts else Block(shape, backend)
            )
        self.on_observation: Callable[[str, Observation], None] | None = None
        self.counting_pass = False
        self.norm: RMSNorm | None = RMSNorm(shape.dim, eps=shape.norm_eps)
        self.output: Head | None = Head(shape.dim, shape.vocab_size, loss)
        self.tie_weights()
        self.register_buffer("rope", torch.empty(max_positions, 2, shape.head_dim // 2), persistent=False)
        self.init_buffers()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter if the shape says so. ``to_empty`` parts them: call it again after
        that. A stage with the head alone keeps the embedding for its matrix.
        """
        if self.shape.enable_weight_tying and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def init_buffers(self) -> None:
        """Fill the buffers in place with what they hold before the first step; they are empty after ``to_empty``."""
        frequencies = rope_frequencies(self.shape.head_dim, self.shape.rope_theta, self.shape.rope_scaling)
        self.rope.copy_(rope_table(self.max_positions, frequencies))
        for balance in balances(self).values():
            balance.reset()

    @torch.no_grad()
    def count_global(self, tokens: torch.Tensor, **inputs: torch.Tensor | None) -> None:
        """Route one micro-batch for its counts alone, before the step's own passes (f_source "exact").

        Arguments as for :meth:`forward`. Every micro-batch of the step comes through here first, then the counts are
        summed over ranks (:func:`model.moe.sum_global_counts`).
        """
        self.counting_pass = True
        try:
            self(tokens, **inputs)
        finally:
            self.counting_pass = False

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
        numbers: torch.Tensor | None = None,
        hidden: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Next-token logits, or with labels their loss; of a part without the head, the hidden states for the next
        part.

        In training with gradients on, each MoE layer's load is counted. A block that is recomputed in the backward
        pass is not run through here again, so it is counted once.

        Args:
            tokens: int64 (B, S).
            positions: int64 (B, S), each token's place in its document. None: 0 .. S - 1.
            document_ids: int32 (B, S), never falling along a sequence; attention stays within equal ids. None: plain
                causal attention.
            document_starts: int32 (B, M), where each document begins, then S; None: found if the kernel wants them.
            numbers: int64 (B, S), see :func:`model.moe.token_numbers`. Unused without experts.
            hidden: (B, S, dim) from the part before; None for the part that begins with the embedding.
            labels: int64 (B, S), see :mod:`model.loss`. A part without the head leaves them alone.

        Returns:
            (B, S, vocab_size), or (B, S, dim), in the compute dtype; with labels a scalar, at least float32.
        """
        rope = self.rope[: tokens.shape[1]] if positions is None else self.rope[positions]
        mask = self.backend.prepare(document_ids, document_starts, tokens)
        if hidden is None:
            assert self.tok_embeddings is not None, "the first part has the embedding"
            hidden = self.tok_embeddings(tokens)
        x = hidden.to(compute_dtype(hidden))
        for name, block in self.layers.items():
            if self.shape.moe is None or not self.shape.moe.has_experts(int(name)):
                x = block(x, rope, mask)
                continue
            balance = block.moe.balance
            x, observation = block(x, rope, mask, numbers, balance.seen())
            if self.counting_pass:
                balance.global_counts += observation.counts
            elif self.training and torch.is_grad_enabled():
                balance.count(observation)
            if self.on_observation is not None:
                self.on_observation(name, observation)
        x = x if self.norm is None else self.norm(x)
        return x if self.output is None else self.output(x, labels=labels)
