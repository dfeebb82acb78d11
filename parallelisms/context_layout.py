"""Which part of each sequence a rank holds under context parallelism, and what its queries see of another rank's keys.

A sequence is cut in pieces of equal length. *contiguous*: n pieces for n ranks, rank r holds piece r. Under causal
attention the last rank then has 2n - 1 times the work of the first. *zigzag*: 2n pieces, rank r holds pieces r and
2n - 1 - r, an early and a late one, and all ranks have the same work (Llama 3, arXiv 2407.21783, section 3.3.2).
"""

from dataclasses import dataclass

import torch

Inputs = dict[str, torch.Tensor]
_BY_TOKEN = ("tokens", "labels", "positions", "numbers")


@dataclass(frozen=True)
class Block:
    """A product of some of a rank's queries with some keys. Slices are of what the two ranks hold."""

    q: slice
    k: slice
    causal: bool
    """Query i of the block sees its keys 0 .. i only."""


@dataclass(frozen=True)
class Layout:
    """How ``degree`` ranks share a sequence. ``name``: "zigzag" or "contiguous"."""

    name: str
    degree: int

    @property
    def pieces(self) -> int:
        """Pieces a sequence is cut in."""
        return 2 * self.degree if self.name == "zigzag" else self.degree

    def held(self, rank: int) -> list[int]:
        """The pieces of ``rank``, in order of the sequence."""
        return [rank, 2 * self.degree - 1 - rank] if self.name == "zigzag" else [rank]

    def places(self, rank: int, length: int, device: torch.device | None = None) -> torch.Tensor:
        """int64 (length / degree,): where in a sequence of ``length`` tokens those of ``rank`` stand, ascending."""
        piece = length // self.pieces
        return torch.cat([torch.arange(i * piece, (i + 1) * piece, device=device) for i in self.held(rank)])

    def block(self, q_rank: int, k_rank: int, length: int, causal: bool) -> Block | None:
        """What queries of ``q_rank`` compute with keys of ``k_rank``, ``length`` of each; None where none is seen.

        Pieces are held in order, so a rank's own block is a plain triangle. Of another rank's, whole pieces are seen
        or not: no block needs a mask for causality.
        """
        whole, half = slice(0, length), length // 2
        if not causal or q_rank == k_rank:
            return Block(whole, whole, causal)
        if self.name == "contiguous":
            return Block(whole, whole, False) if k_rank < q_rank else None
        if k_rank < q_rank:  # its early piece comes before both of ours, its late piece after both
            return Block(whole, slice(0, half), False)
        return Block(slice(half, length), whole, False)  # our late piece comes after both of its pieces

    def mask(
        self, documents: torch.Tensor | None, q_rank: int, k_rank: int | None, block: Block
    ) -> torch.Tensor | None:
        """bool (B, Sq, Sk): which keys of ``block`` its queries may look at by document alone; None: all.

        Args:
            documents: int32 (B, S), of whole sequences.
            k_rank: whose keys ``block.k`` is of; None: of the whole sequence, in order.
        """
        if documents is None:
            return None
        q = documents[:, self.places(q_rank, documents.shape[1], documents.device)[block.q]]
        if k_rank is not None:
            documents = documents[:, self.places(k_rank, documents.shape[1], documents.device)]
        return q[:, :, None] == documents[:, None, block.k]

    def part(self, inputs: Inputs, rank: int) -> Inputs:
        """What ``rank`` computes of a micro-batch.

        Tokens, labels, positions and numbers (B, S) become (B, S / degree). ``positions`` is made where it is missing:
        places are no longer 0, 1, 2, ... What is known of documents stays whole, as queries are compared with the keys
        of all ranks.
        """
        tokens = inputs["tokens"]
        places = self.places(rank, tokens.shape[1], tokens.device)
        held = {name: x.index_select(1, places) if name in _BY_TOKEN else x for name, x in inputs.items()}
        held.setdefault("positions", places.repeat(len(tokens), 1))
        return held
