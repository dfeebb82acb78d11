"""Attention on a block of queries and a block of keys, with what is needed to put blocks together.

A softmax over keys that lie in several blocks is found from the blocks' own results: each gives its output and the
logarithm of its sum of exponentials (``lse``), and two of them merge as ``sum exp(lse_i - lse) out_i`` (Milakov and
Gimelshein, arXiv 1805.02867; Liu et al., arXiv 2310.01889). The backward needs only the lse and the output of the whole
row: ``p = exp(s - lse)`` is then the true share of a key, whichever block it lies in.
"""

from typing import Protocol

import torch


class BlockKernel(Protocol):
    """Forward and backward of attention on one block, called by hand: no autograd inside."""

    masks: bool
    """Whether ``mask`` may be given."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the keys of this block.

        Args:
            q: (B, Sq, H, D).
            k, v: (B, Sk, H_kv, D), H_kv dividing H; query head h reads key head h // (H / H_kv).
            causal: query i sees keys 0 .. i; Sq == Sk then.
            mask: bool (B, Sq, Sk), True where a query may look; with ``causal``, both must hold.

        Returns:
            Output (B, Sq, H, D) in the dtype of q, and lse (B, H, Sq) in float32 (float64 for float64 inputs). Scores
            are scaled by D ** -0.5. A query that sees no key of the block has output 0 and lse -inf.
        """

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What this block adds to the gradients of q, k and v.

        Args:
            dout, out: gradient and output (B, Sq, H, D), and
            lse: (B, H, Sq): of this block, or of the whole row when there are other blocks.
            q, k, v, causal, mask: as in ``forward``.

        Returns:
            Gradients in the shapes of q, k and v.
        """


class ReferenceBlocks:
    """Plain operators with the block's score matrix in memory, accumulated in float32 (float64 for float64 inputs).

    Serves any device, and is what every other kernel is compared with.
    """

    masks = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = block_scores(q, k, causal, mask)  # (B, H_kv, G, Sq, Sk)
        lse = scores.logsumexp(-1)
        out = torch.einsum("bhgqk,bkhd->bqhgd", shares(scores, lse), v.to(scores.dtype))
        return out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = block_scores(q, k, causal, mask)
        wide, kv_heads = scores.dtype, k.shape[2]
        p = shares(scores, lse.unflatten(1, (kv_heads, -1)))
        dout, out, queries = (x.to(wide).unflatten(2, (kv_heads, -1)) for x in (dout, out, q))  # (B, Sq, H_kv, G, D)
        keys, values = k.to(wide), v.to(wide)
        dv = torch.einsum("bhgqk,bqhgd->bkhd", p, dout)
        dp = torch.einsum("bqhgd,bkhd->bhgqk", dout, values)
        row = (dout * out).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)  # sum over keys of p dp
        ds = p * (dp - row) * q.shape[-1] ** -0.5
        dq = torch.einsum("bhgqk,bkhd->bqhgd", ds, keys).flatten(2, 3)
        dk = torch.einsum("bhgqk,bqhgd->bkhd", ds, queries)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def block_scores(q: torch.Tensor, k: torch.Tensor, causal: bool, mask: torch.Tensor | None) -> torch.Tensor:
    """Scaled scores (B, H_kv, G, Sq, Sk) in float32 or float64, -inf where a query may not look."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    queries = q.to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bhgqk", queries, k.to(wide)) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    return scores


def shares(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), keys along the last axis of ``scores``; 0 in a row that sees no key, whose lse is -inf."""
    lse = lse.to(scores.dtype).masked_fill(lse == -torch.inf, torch.inf)
    return (scores - lse.unsqueeze(-1)).exp()
