"""A key-value cache in place of the attention kernel: a pass over new tokens attends to all that came before.

A query sees what it sees without a cache: keys of its own document id, at its own index or earlier. Sequences of
unequal length are padded on the left, with a document id that no token has.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from model.attention import Attention
from model.attention_blocks import BlockKernel
from model.decoder import Decoder


class KVCache:
    """What the layers' caches share: how far they are filled. The decoder's backend while it is in place.

    Args:
        length: L, tokens of a sequence there is room for.
    """

    name = "kv_cache"
    blocks: BlockKernel | None = None

    def __init__(self, length: int):
        self.length = length
        self.start = self.end = 0  # the present pass holds tokens start .. end - 1
        self.document_ids: torch.Tensor | None = None  # (B, L)

    def prepare(
        self,
        document_ids: torch.Tensor | None,
        document_starts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Begin a pass over ``tokens`` (B, S). Give ``document_ids`` (B, S) in every pass or in none.

        Returns:
            Boolean, True where a query may look: (B, 1, S, tokens so far) with ids; (S, tokens so far) without, where
            SDPA's causal triangle, which begins at the first key, is not it; else None.

        Raises:
            ValueError: there is no room for S more tokens.
        """
        assert tokens is not None  # the decoder gives them
        batch, new = tokens.shape
        self.start, self.end = self.end, self.end + new
        if self.end > self.length:
            raise ValueError(f"the cache has room for {self.length} tokens, not for {self.end}")
        if document_ids is None:
            if new in (1, self.end):
                return None
            return torch.ones(new, self.end, dtype=torch.bool, device=tokens.device).tril(self.start)
        if self.document_ids is None:
            self.document_ids = document_ids.new_zeros(batch, self.length)
        self.document_ids[:, self.start : self.end] = document_ids
        same = document_ids[:, :, None] == self.document_ids[:, None, : self.end]
        return same.tril(self.start)[:, None]


class CachedAttention:
    """The attention backend of one layer: appends keys and values, attends to all of them.

    Args:
        cache: shared by the layers of a model.
    """

    name = "kv_cache"
    blocks: BlockKernel | None = None

    def __init__(self, cache: KVCache):
        self.cache = cache
        self.kept: torch.Tensor | None = None  # keys and values, (2, B, H_kv, L, D)

    def prepare(
        self,
        document_ids: torch.Tensor | None,
        document_starts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """As :meth:`KVCache.prepare`."""
        return self.cache.prepare(document_ids, document_starts, tokens)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """``q`` (B, S, H, D), ``k`` and ``v`` (B, S, H_kv, D) of the new tokens alone -> (B, S, H, D)."""
        cache = self.cache
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.kept is None:
            self.kept = k.new_empty(2, *k.shape[:2], cache.length, k.shape[3])
        self.kept[:, :, :, cache.start : cache.end] = torch.stack([k, v])
        k, v = self.kept[:, :, :, : cache.end]
        causal = mask is None and q.shape[2] > 1
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)


@contextmanager
def cached(model: Decoder, length: int) -> Iterator[KVCache]:
    """Within, each pass of ``model`` continues the ones before; pass ``positions``, which a cache does not know.

    Args:
        length: tokens of a sequence over all passes.
    """
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    before = model.backend, [layer.backend for layer in layers]
    cache = KVCache(length)
    try:
        model.backend = cache  # type: ignore[assignment]  # prepares, attends to nothing: that is the layers'
        for layer in layers:
            layer.backend = CachedAttention(cache)
        yield cache
    finally:
        model.backend = before[0]
        for layer, backend in zip(layers, before[1], strict=True):
            layer.backend = backend
