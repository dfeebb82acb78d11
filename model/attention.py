"""Causal self-attention with grouped queries, and the seam through which its kernel is given.

``Attention`` projects, rotates and hands ``(q, k, v, mask)`` to an *attention backend*; it does not know which kernel
runs or whether keys live on other ranks. ``parallelisms/`` may wrap the backend; nothing else of attention crosses.
"""

from typing import Any, Protocol

import torch
from torch import nn

from config.flavors import ModelShape
from model.attention_blocks import BlockKernel
from model.attention_flash import FlashAttention2, FlashAttention4
from model.attention_flex import Flex
from model.attention_sdpa import SDPA, SDPACuDNN, SDPAFlash, SDPAMath
from model.compute_dtype import RMSNorm
from model.rope import rotate


class AttentionBackend(Protocol):
    """A kernel for causal attention."""

    name: str
    blocks: BlockKernel | None
    """The same kernel on a block of queries and keys, for context parallelism; None where it has no such form."""

    def prepare(
        self,
        document_ids: torch.Tensor | None,
        document_starts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> Any:
        """Whatever the kernel wants to know about documents, made once a forward pass and shared by all layers.

        Args:
            document_ids: int32 (B, S), equal within a document and never falling along a sequence, or None when
                attention may cross documents.
            document_starts: int32 (B, M), where each document begins, then S; None if that is not known.
            tokens: (B, S), for its shape and device.
        """

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        """Attend.

        Args:
            q: (B, S, H, D).
            k, v: (B, S, H_kv, D), H_kv dividing H; query head h reads key head h // (H / H_kv).
            mask: what ``prepare`` returned.

        Returns:
            (B, S, H, D). Scores are scaled by D ** -0.5.
        """


BACKENDS: dict[str, type[AttentionBackend]] = {
    "sdpa": SDPA,
    "sdpa_math": SDPAMath,
    "sdpa_flash": SDPAFlash,
    "sdpa_cudnn": SDPACuDNN,
    "flex": Flex,
    "flash2": FlashAttention2,
    "flash4": FlashAttention4,
}
"""What each can do is in config/attention.py."""


def attention_backend(name: str) -> AttentionBackend:
    """The backend of that name; "auto" is resolved before (:func:`model.attention_choice.attention_of`)."""
    return BACKENDS[name]()


class Attention(nn.Module):
    """Grouped-query self-attention (Ainslie et al., arXiv 2305.13245) without biases.

    Args:
        shape: the model's shape.
        backend: the attention kernel; may be replaced after construction.
    """

    def __init__(self, shape: ModelShape, backend: AttentionBackend):
        super().__init__()
        self.head_dim = shape.head_dim
        self.backend = backend
        self.wq = nn.Linear(shape.dim, shape.n_heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.n_kv_heads * shape.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.n_kv_heads * shape.head_dim, bias=False)
        self.wo = nn.Linear(shape.n_heads * shape.head_dim, shape.dim, bias=False)
        whole = shape.qk_norm_scope == "projection"  # one norm over all heads (OLMoE), instead of one a head (Qwen3)
        q_width = shape.n_heads * shape.head_dim if whole else shape.head_dim
        k_width = shape.n_kv_heads * shape.head_dim if whole else shape.head_dim
        self.q_norm = RMSNorm(q_width, eps=shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(k_width, eps=shape.norm_eps) if shape.qk_norm else None
        self.norm_whole = whole
        self.rotate = rotate

    def forward(self, x: torch.Tensor, rope: torch.Tensor, mask: Any) -> torch.Tensor:
        """(B, S, dim) -> (B, S, dim). ``rope``: rows of the rotary table for these positions."""
        # The number of heads is read off the projection, which tensor parallelism narrows.
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # (B, S, H, D)
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # (B, S, H_kv, D)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            if self.norm_whole:
                q = self.q_norm(q.flatten(-2)).unflatten(-1, (-1, self.head_dim))
                k = self.k_norm(k.flatten(-2)).unflatten(-1, (-1, self.head_dim))
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, k, rope)
        out = self.backend(q, k, v, mask)
        return self.wo(out.flatten(-2))
