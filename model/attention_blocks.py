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


def refuse(mask: torch.Tensor | None) -> None:
    """ValueError: a mask was given to a kernel that takes none."""
    if mask is not None:
        raise ValueError("this block kernel takes no mask (BlockKernel.masks)")


class ReferenceBlocks:
    """Plain operators, accumulated in float32 (float64 for float64 inputs), the scores of some queries at a time in
    memory.

    Serves any device, and is what every other kernel is compared with.

    Args:
        queries: at a time.
    """

    masks = True

    def __init__(self, queries: int = 1024):
        self.queries = queries

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for rows in self._rows(q):
            scores = block_scores(q, k, rows, causal, mask)  # (B, H_kv, G, rows, Sk)
            lse = scores.logsumexp(-1)
            out = torch.einsum("bhgqk,bkhd->bqhgd", shares(scores, lse), v.to(scores.dtype))
            found.append((out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2)))
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2)

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
        wide, kv_heads = torch.promote_types(q.dtype, torch.float32), k.shape[2]
        keys, values = k.to(wide), v.to(wide)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(values)
        for rows in self._rows(q):
            scores = block_scores(q, k, rows, causal, mask)
            p = shares(scores, lse[:, :, rows].unflatten(1, (kv_heads, -1)))
            # (B, rows, H_kv, G, D)
            douts, outs, queries = (x[:, rows].to(wide).unflatten(2, (kv_heads, -1)) for x in (dout, out, q))
            dv += torch.einsum("bhgqk,bqhgd->bkhd", p, douts)
            dp = torch.einsum("bqhgd,bkhd->bhgqk", douts, values)
            row = (douts * outs).sum(-1).permute(0, 2, 3, 1).unsqueeze(-1)  # sum over keys of p dp
            ds = p * (dp - row) * q.shape[-1] ** -0.5
            dq[:, rows] = torch.einsum("bhgqk,bkhd->bqhgd", ds, keys).flatten(2, 3).to(q.dtype)
            dk += torch.einsum("bhgqk,bqhgd->bkhd", ds, queries)
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _rows(self, q: torch.Tensor) -> list[slice]:
        return [slice(i, min(i + self.queries, q.shape[1])) for i in range(0, q.shape[1], self.queries)]


def block_scores(
    q: torch.Tensor, k: torch.Tensor, rows: slice, causal: bool, mask: torch.Tensor | None
) -> torch.Tensor:
    """Scaled scores (B, H_kv, G, rows, Sk) of some queries in float32 or float64, -inf where one may not look."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q[:, rows].to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bqhgd,bkhd->bhgqk", queries, k.to(wide)) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + rows.start)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, rows], -torch.inf)
    return scores


def shares(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), keys along the last axis of ``scores``; 0 in a row that sees no key, whose lse is -inf."""
    lse = lse.to(scores.dtype).masked_fill(lse == -torch.inf, torch.inf)
    return (scores - lse.unsqueeze(-1)).exp()
