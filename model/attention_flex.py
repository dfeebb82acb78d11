"""FlexAttention: one compiled kernel that skips the blocks of the score matrix in which nothing may be seen.

The block mask is built from the ends of blocks, in (S / 128)^2 steps; torch's ``create_block_mask`` evaluates all S^2
pairs. On CUDA forward and backward are compiled. On a CPU the forward pass runs uncompiled, and torch has no backward.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from model.attention_blocks import BlockKernel

BLOCK = 128
"""Queries, and keys, of a block."""


def document_block_mask(document_ids: torch.Tensor) -> BlockMask:
    """Causal attention within equal ids, int (B, S), never falling along a sequence. Nothing waits for the device."""

    def allowed(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q >= k) & (document_ids[b, q] == document_ids[b, k])

    return _block_mask(document_ids, allowed)


@functools.cache
def causal_block_mask(length: int, device: torch.device) -> BlockMask:
    """Plain causal attention over ``length`` tokens, any batch."""
    one_document = torch.zeros(1, length, dtype=torch.int32, device=device)
    return _block_mask(one_document, lambda b, h, q, k: q >= k)


def _block_mask(document_ids: torch.Tensor, allowed: Callable[..., torch.Tensor]) -> BlockMask:
    length, device = document_ids.shape[1], document_ids.device
    count = -(-length // BLOCK)
    row = torch.arange(count, device=device)[:, None]  # of queries
    column = torch.arange(count, device=device)  # of keys
    first, last = document_ids[:, column * BLOCK], document_ids[:, ((column + 1) * BLOCK - 1).clamp(max=length - 1)]
    seen = (column <= row) & (last[:, None] >= first[:, :, None])  # (B, rows, columns)
    # Everything is seen where a block of keys lies before that of the queries, and one document covers both.
    whole = (column < row) & (first[:, None] == last[:, :, None]) & ((row + 1) * BLOCK <= length)
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=allowed,
        seq_lengths=(length, length),
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of each row are set, (B, 1, rows), and which, these first: (B, 1, rows, columns), int32."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()


@functools.cache
def _compiled() -> Callable[..., Any]:
    # fullgraph: at the limit of recompilations torch stops with an error. Otherwise it would go on with the
    # uncompiled operator, which holds the score matrix.
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


class Flex:
    """FlexAttention; masks are built once a forward pass."""

    name = "flex"
    blocks: BlockKernel | None = None

    def prepare(
        self,
        document_ids: torch.Tensor | None,
        document_starts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> BlockMask | None:
        """The block mask; None when there are neither documents nor ``tokens`` to tell the length."""
        if document_ids is not None:
            return document_block_mask(document_ids)
        return None if tokens is None else causal_block_mask(tokens.shape[1], tokens.device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask | None) -> torch.Tensor:
        if mask is None:
            mask = causal_block_mask(q.shape[1], q.device)
        kernel = flex_attention if not q.is_cuda or torch.compiler.is_compiling() else _compiled()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
