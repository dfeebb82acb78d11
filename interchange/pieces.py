"""Which tensor of a Hugging Face folder is which part of which parameter.

A :class:`Piece` is a view: reading a folder copies tensors into views of a parameter, writing one copies views out, and
the two cannot disagree. Nothing is computed, so both ways are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from config.shapes import ModelShape
from interchange.families import ExpertNames, Family


@dataclass(frozen=True)
class Piece:
    """The tensor ``hf`` of a folder is part of the parameter ``name``: one expert of it, or every second column."""

    hf: str
    name: str
    expert: int | None = None
    column: int | None = None
    """First of the columns, two apart, that form it (0: gate, 1: up; see model/experts.py), stored transposed."""

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The part of ``parameter``, sharing its memory, in the layout of the folder."""
        part = parameter if self.expert is None else parameter[self.expert]
        return part if self.column is None else part[:, self.column :: 2].T


def pieces(shape: ModelShape, family: Family) -> Iterator[Piece]:
    """All pieces of a model, those of a parameter next to each other, from the embedding to the head.

    A tied head is no piece: it is the embedding.
    """
    yield Piece("model.embed_tokens.weight", "tok_embeddings.weight")
    for i in range(shape.n_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        yield Piece(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
        for letter in "qkvo":
            yield Piece(f"{theirs}.self_attn.{letter}_proj.weight", f"{ours}.attention.w{letter}.weight")
        if shape.qk_norm:
            for letter in "qk":
                yield Piece(f"{theirs}.self_attn.{letter}_norm.weight", f"{ours}.attention.{letter}_norm.weight")
        yield Piece(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight")
        if shape.moe is not None and family.experts is not None and shape.moe.has_experts(i):
            yield from _experts(theirs, ours, shape.moe.num_experts, family.experts)
        else:
            for layer, number in (("gate_proj", 1), ("up_proj", 3), ("down_proj", 2)):
                yield Piece(f"{theirs}.mlp.{layer}.weight", f"{ours}.feed_forward.w{number}.weight")
    yield Piece("model.norm.weight", "norm.weight")
    if not shape.enable_weight_tying:
        yield Piece("lm_head.weight", "output.weight")


def _experts(theirs: str, ours: str, count: int, names: ExpertNames) -> Iterator[Piece]:
    yield Piece(f"{theirs}.{names.block}.gate.weight", f"{ours}.moe.router.gate.weight")
    for e in range(count):
        for layer, column in ((names.gate, 0), (names.up, 1)):
            yield Piece(
                f"{theirs}.{names.block}.experts.{e}.{layer}.weight", f"{ours}.moe.experts.w13", expert=e, column=column
            )
    for e in range(count):
        yield Piece(f"{theirs}.{names.block}.experts.{e}.{names.down}.weight", f"{ours}.moe.experts.w2", expert=e)


def parameter_sizes(shape: ModelShape) -> dict[str, torch.Size]:
    """Name -> size of every parameter, a tied head left out. Allocates nothing."""
    from model.attention import attention_backend
    from model.decoder import Decoder

    with torch.device("meta"):
        model = Decoder(shape, attention_backend("sdpa_math"), max_positions=1)
    return {name: parameter.shape for name, parameter in model.named_parameters()}
