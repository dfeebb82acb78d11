"""A Llama-3 style decoder (arXiv 2407.21783): pre-norm blocks of grouped-query attention and SwiGLU.

Parameter names are torchtitan's. Blocks are kept in a dictionary under their global index, so that a part of the model
keeps the names of the whole.
"""

from typing import Any

import torch
from torch import nn

from config.flavors import ModelShape
from model.attention import Attention, AttentionBackend
from model.feed_forward import FeedForward
from model.rope import rope_frequencies, rope_table


class Block(nn.Module):
    """One Transformer block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, shape: ModelShape, backend: AttentionBackend):
        super().__init__()
        self.attention = Attention(shape, backend)
        self.feed_forward = FeedForward(shape.dim, shape.hidden_dim)
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)

    def forward(self, x: torch.Tensor, rope: torch.Tensor, mask: Any) -> torch.Tensor:
        """(B, S, dim) -> (B, S, dim)."""
        x = x + self.attention(self.attention_norm(x), rope, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """Token ids in, logits out.

    Args:
        shape: the model's shape.
        backend: attention kernel of every block.
        max_positions: rows of the rotary table, the longest sequence this instance will see.
    """

    def __init__(self, shape: ModelShape, backend: AttentionBackend, max_positions: int):
        super().__init__()
        self.shape = shape
        self.backend = backend
        self.max_positions = max_positions
        self.tok_embeddings = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleDict({str(i): Block(shape, backend) for i in range(shape.n_layers)})
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.output = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        self.tie_weights()
        self.register_buffer("rope", torch.empty(max_positions, 2, shape.head_dim // 2), persistent=False)
        self.init_buffers()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter if the shape says so. ``to_empty`` parts them: call it again after that."""
        if self.shape.enable_weight_tying:
            self.output.weight = self.tok_embeddings.weight

    def init_buffers(self) -> None:
        """Fill the buffers in place: they are no part of a checkpoint and are empty after ``to_empty``."""
        frequencies = rope_frequencies(self.shape.head_dim, self.shape.rope_theta, self.shape.rope_scaling)
        self.rope.copy_(rope_table(self.max_positions, frequencies))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Next-token logits.

        Args:
            tokens: int64 (B, S).
            positions: int64 (B, S), each token's place in its document. None: 0 .. S - 1.
            document_ids: int32 (B, S); attention stays within equal ids. None: plain causal attention.

        Returns:
            (B, S, vocab_size) in the compute dtype.
        """
        rope = self.rope[: tokens.shape[1]] if positions is None else self.rope[positions]
        mask = self.backend.prepare(document_ids)
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, rope, mask)
        return self.output(self.norm(x))
