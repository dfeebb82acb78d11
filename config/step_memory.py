"""What is in a rank's memory at each moment of a step, part by part. config/estimate.py says what it is for.

A step has four moments at which memory may be fullest: at the loss and in the last block's backward pass (all
activations), in the first block's backward pass (all gradients), and in the optimizer's step. Between the middle two,
activations go and gradients come at one pace. A fifth is between two micro-batches, if gathered parameters are kept.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from config.arithmetic import tensors
from config.flavors import resolve_shape
from config.loss import loss_implementation, loss_peak_bytes
from config.memory import ExpertDegrees, Memory, expert_spread, local_shapes, memory, state_pieces
from config.refusal import compares_operators, compiled, compiles
from config.saved_tensors import Block, Kernels, Numbers, block, share_within_budget
from config.schema import Config
from config.shapes import ModelShape

BLOCKS_ON_DEVICE = 2
"""Blocks whose activations are on the device under offload (parallelisms/activation_offload.py)."""
RECOMPUTED = ("full", "nested")
ENDS = ("tok_embeddings", "norm", "output")


@dataclass(frozen=True)
class Part:
    """Bytes that are there at a moment; ``coefficient`` scales them, "" where they are exact."""

    name: str
    size: float
    coefficient: str = ""


@dataclass(frozen=True)
class Moment:
    """A point in a step, and all that is in memory at it."""

    name: str
    parts: tuple[Part, ...]

    def size(self, coefficients: dict[str, float]) -> float:
        """Bytes."""
        return sum(p.size * coefficients.get(p.coefficient, 1.0) for p in self.parts)


def held_by(config: Config, degrees: dict[str, int], modules: Collection[str] | None) -> Memory:
    """Weights, gradients and states of the rank that holds ``modules`` (None: all)."""
    return memory(
        resolve_shape(config.model, config.moe),
        config.optimizer.name,
        degrees["dp_shard"] * degrees["cp"],
        tensor_degree=degrees["tp"],
        state_degree=degrees["dp_replicate"] if config.parallelism.zero_stage == 1 else 1,
        state_bytes=2 if config.optimizer.state_dtype == "bfloat16" else 4,
        expert_degrees=expert_spread(degrees),
        modules=modules,
    )


@dataclass(frozen=True)
class Rank:
    """What one rank does: ``modules`` (None: all), ``flying`` micro-batches between their forward and backward passes,
    gradients of earlier ones kept (``accumulates``)."""

    config: Config
    degrees: dict[str, int]
    modules: Collection[str] | None
    flying: int
    accumulates: bool

    def moments(self) -> tuple[Moment, ...]:
        held = held_by(self.config, self.degrees, self.modules)
        weights, gradients, states = self._held()
        here = (weights, states)
        earlier = (self._whole_gradients() or gradients,) if self.accumulates else ()
        kept = (*here, *earlier, *self._activations())
        found = [Moment("in the optimizer step", (*here, gradients, Part("update", self._update(held))))]
        if layers := self._layers():
            ended = (*here, *(earlier or (gradients,)), *self._backward(layers[0]))
            found.append(Moment("in the first block's backward pass", ended))
            if self.accumulates and self.config.parallelism.fsdp_reshard_after_backward == "never":
                found.append(self.gathered_moment())
            head = Part("gradients", 0 if self.accumulates or not self._has_head else self._head_gradient())
            last = self._backward(layers[-1], kept=self._kept(len(layers) - 1, layers[-1]))
            found.append(Moment("in the last block's backward pass", (*kept, head, self._sent(), *last)))
        if self._has_head:
            before = (self._sent(),) if self.accumulates else ()
            found.append(Moment("at the loss", (*kept, *before, *self._loss())))
        return tuple(found)

    def _held(self) -> tuple[Part, Part, Part]:
        """Weights, gradients and states: on the device, and sharded as the layout says."""
        held, offload = held_by(self.config, self.degrees, self.modules), self.config.training.enable_cpu_offload
        away = offload or self.config.optimizer.state_offload
        return (
            Part("weights", 0 if offload else held.parameters),
            Part("gradients", 0 if offload else held.gradients),
            Part("optimizer states", 0 if away else held.optimizer_states),
        )

    def gathered_moment(self) -> Moment:
        """The end of a backward pass that has kept all parameters it gathered, for the next micro-batch."""
        (weights, gradients, states), layers = self._held(), self._layers()
        whole = self.numbers.compute * self._elements() * self.sharded
        gathered = Part("gathered blocks", max(0, whole - self._gathered()))
        ended = (self._sent(), *(self._backward(layers[0]) if layers else ()))
        return Moment(
            "between two micro-batches", (weights, self._whole_gradients() or gradients, states, gathered, *ended)
        )

    def _sent(self) -> Part:
        """The message of the latest reduction, which FSDP2 keeps until the next begins: the head's while the last block
        goes back, the embedding's until the next micro-batch has come to its head. Not in a pipeline, which reduces
        when its schedule ends.
        """
        section, training = self.config.parallelism, self.config.training
        if not self._gathered() or self.modules is not None or section.fsdp_version == 1 or self._whole_gradients():
            return Part("gradients", 0)
        direct = section.fsdp_collectives == "direct" and self.degrees["dp_replicate"] == 1
        wide = 2 if training.mixed_precision_reduce == "bfloat16" else self.numbers.compute if direct else 4
        return Part("gradients", wide * self.shape.vocab_size * self.shape.dim // self.degrees["tp"])

    def _elements(self) -> int:
        """Parameters of the modules here, whole along the axes that FSDP shards over."""
        spread, tensor = expert_spread(self.degrees), self.degrees["tp"]
        shapes = local_shapes(self.shape, tensor, self.modules, experts=spread is None)
        found = sum(prod(s) for s in shapes)
        if spread is not None:
            experts = sum(t.numel for t in tensors(self.shape, self._layers()) if t.expert)
            found += experts // (spread.ep * spread.etp)
        return found

    def _whole_gradients(self) -> Part | None:
        """Gradients that wait for the last micro-batch to be reduced."""
        if not self.sharded or self.config.parallelism.fsdp_reduce_gradients == "each":
            return None
        wide = 2 if self.config.training.mixed_precision_reduce == "bfloat16" else 4
        return Part("whole gradients", wide * self._elements())

    @property
    def _has_head(self) -> bool:
        return self.modules is None or "output" in self.modules

    def _head_gradient(self) -> int:
        """Bytes: of the head's matrix alone, in float32."""
        shards = self.degrees["dp_shard"] * self.degrees["cp"] * self.degrees["tp"]
        return 4 * self.shape.vocab_size * self.shape.dim // shards

    @property
    def shape(self) -> ModelShape:
        return resolve_shape(self.config.model, self.config.moe)

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 (or FSDP1) holds the weights; else the forward pass runs under autocast."""
        return self.degrees["dp_shard"] * self.degrees["cp"] > 1 or self.degrees["tp"] > 1

    @property
    def numbers(self) -> Numbers:
        compute = 2 if self.config.training.mixed_precision_param == "bfloat16" else 4
        return Numbers(compute, self.degrees["tp"])

    @property
    def tokens(self) -> int:
        """Of one micro-batch on this rank."""
        training, section = self.config.training, self.config.parallelism
        pieces = self.degrees["pp"] > 1 and section.pipeline_parallel_schedule != "naive"
        rows = section.pipeline_parallel_microbatch_size if pieces else training.local_batch_size
        return rows * training.seq_len // self.degrees["cp"]

    def _layers(self) -> list[int]:
        if self.modules is None:
            return list(range(self.shape.n_layers))
        return [int(name.removeprefix("layers.")) for name in self.modules if name.startswith("layers.")]

    def _block(self, layer: int) -> Block:
        config, liger = self.config, self.config.liger
        keeps_scores = config.attention.backend == "sdpa_math"
        kernels = Kernels(config.training.seq_len if keeps_scores else 0, liger.swiglu)
        moe = self.shape.moe
        return block(self.shape, self.numbers, kernels, with_experts=moe is not None and moe.has_experts(layer))

    def _kept(self, place: int, layer: int) -> tuple[float, float, float]:
        """Bytes a token that block ``layer``, the ``place``-th, keeps: exact, scaled as activations, as experts'."""
        section, each = self.config.activation_checkpoint, self._block(layer)
        mode, inside = section.mode, each.compiled if compiled(self.config) else each.eager
        rest = inside - each.boundary - each.experts
        if compares_operators(self.config):
            unread = each.unread if compiled(self.config) else 0.0
            return each.boundary, each.operators - unread - each.boundary, 0.0
        if mode == "experts" and each.experts:
            return 2 * each.boundary, 0.0, each.experts
        if mode == "memory_budget":
            share = self._within_budget(layer)
            return each.boundary, share * rest, share * each.experts
        every = int(section.selective_ac_option) if mode == "selective" else 1
        if mode in (*RECOMPUTED, "experts") or (mode == "selective" and place % every == 0):
            return each.boundary, 0.0, 0.0
        return each.boundary, rest, each.experts

    def _within_budget(self, layer: int) -> float:
        """Share of what a compiled block would keep beside its input that its memory budget lets it keep."""
        each, casts = self._block(layer), 2 * self._matrices(layer) if self._autocast else 0
        kept = self.tokens * (each.compiled - each.boundary)
        return share_within_budget(self.config.activation_checkpoint.memory_budget, kept, casts)

    def _weights_kept(self, place: int, layer: int) -> int:
        """Elements of the matrices that block ``place`` saves in the compute dtype."""
        section = self.config.activation_checkpoint
        if section.mode == "experts":
            return self._matrices(layer, experts_alone=True)
        every = section.selective_ac_option
        keeps = section.mode == "none" or (section.mode == "selective" and every != "op" and place % int(every) != 0)
        keeps = keeps or (section.mode == "memory_budget" and self._within_budget(layer) == 1)
        return self._matrices(layer) if keeps else 0

    def _activations(self) -> tuple[Part, ...]:
        """All that forward passes have left, when the last block's is done."""
        layers = self._layers()
        kept = [self._kept(place, layer) for place, layer in enumerate(layers)]
        tokens, mode = self.flying * self.tokens, "compiled" if compiled(self.config) else "eager"
        if self.config.activation_checkpoint.offload:
            kept = kept[-BLOCKS_ON_DEVICE:]
        exact, scaled, experts = (tokens * sum(column) for column in zip(*kept, strict=True)) if kept else (0, 0, 0)
        return (
            Part("activations", exact),
            Part("activations", scaled, mode),
            Part("activations", experts, "experts"),
            self._casts(sum(self._weights_kept(place, layer) for place, layer in enumerate(layers))),
            Part("gathered blocks", self._gathered()),
        )

    @property
    def _autocast(self) -> bool:
        """Whether weights are cast where they are used, and their gradients cast back."""
        return not self.sharded and self.numbers.compute == 2

    def _casts(self, kept: int) -> Part:
        """Weights in the compute dtype, which a forward pass under autocast leaves behind: the ``kept`` elements, and
        without a compiler all, checkpointed or not, as autocast's cache lives as long as the pass."""
        if not self._autocast:
            return Part("weights in bfloat16", 0)
        if compiled(self.config):
            return Part("weights in bfloat16", 2 * kept, "casts")
        return Part("weights in bfloat16", 2 * sum(self._matrices(layer) for layer in self._layers()))

    def _matrices(self, layer: int, *, experts_alone: bool = False) -> int:
        """Elements of one block's matrices on this rank."""
        degrees = expert_spread(self.degrees)
        spread = degrees or ExpertDegrees(1, self.degrees["tp"], 1)
        found = 0
        for t in tensors(self.shape, [layer]):
            if t.kind == "linear" and (t.expert or not experts_alone):
                found += t.numel // (
                    spread.ep * spread.etp if t.expert else self.degrees["tp"] if t.cut is not None else 1
                )
        return found

    def _gathered(self) -> int:
        """What FSDP2 has gathered in a forward pass: a block in use, those prefetched, embedding, norm and head."""
        if not self.sharded or self.degrees["dp_shard"] * self.degrees["cp"] == 1:
            return 0
        layers = self._layers()
        ends = sum(
            prod(s)
            for s in local_shapes(self.shape, self.degrees["tp"], [m for m in self.modules or ENDS if m in ENDS])
        )
        largest = max((self._matrices(layer) for layer in layers), default=0)
        blocks = 1 + (self.config.parallelism.fsdp_prefetch_blocks or 1)
        if self.config.parallelism.zero_stage == 2 or self.config.parallelism.fsdp_reshard_after_forward == "never":
            blocks = len(layers)
        return self.numbers.compute * (min(blocks, len(layers)) * largest + ends)

    def _backward(self, layer: int, kept: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> tuple[Part, ...]:
        """What is there in the backward pass of block ``layer``: all that it saves without checkpointing, less what of
        it is ``kept`` (:meth:`_kept`) and counted elsewhere, and its gradients on their way.
        """
        each, tokens, mode = self._block(layer), self.tokens, "compiled" if compiled(self.config) else "eager"
        inside = (each.compiled if mode == "compiled" else each.eager) - each.boundary - each.experts
        matrices = self._matrices(layer)
        arriving = matrices * self.numbers.compute  # gradients, before they are float32
        reduced = 4 * matrices if self._gathered() or self._autocast else 0
        again = 2 * matrices if self._autocast and compiled(self.config) and not kept[1] else 0  # cast once more
        return (
            Part("activations", tokens * max(0.0, each.boundary - kept[0])),
            Part("activations", tokens * max(0.0, inside - kept[1]), mode),
            Part("activations", tokens * max(0.0, each.experts - kept[2]), "experts"),
            Part("gradients of activations", tokens * each.working + arriving, "working"),
            Part("gathered blocks", self._gathered()),
            Part("gradients", reduced),
            Part("weights in bfloat16", again),
        )

    def _loss(self) -> tuple[Part, ...]:
        """Final norm, hidden states, head and loss."""
        n, c, section, implementation = (
            self.numbers,
            self.numbers.compute,
            self.config.loss,
            loss_implementation(self.config),
        )
        gathers = self.config.parallelism.disable_loss_parallel
        size = loss_peak_bytes(
            implementation,
            tokens=self.tokens,
            vocab=self.shape.vocab_size // (1 if gathers else n.tensor),
            dim=self.shape.dim,
            compute_bytes=c,
            weight_bytes=c if self.sharded else 4,
            chunk=section.columns_per_chunk if implementation == "vocab_chunked" else section.rows_per_chunk,
            compiled=compiles(self.config, "loss") and self.config.compile.backend == "inductor",
            shared=n.tensor > 1 and not gathers,
        )
        return (Part("activations", self.tokens * self.shape.dim * 3 * c), Part("loss", size, "loss"))

    def _update(self, held: Memory) -> int:
        """What the optimizer's step takes for itself."""
        section = self.config.optimizer
        if self.config.training.enable_cpu_offload:
            return 0
        if section.state_offload:  # a piece on its way in, one that is updated, one on its way out
            shards, spread = self.degrees["dp_shard"] * self.degrees["cp"], expert_spread(self.degrees)
            pieces = state_pieces(self.shape, self.modules, shards, self.degrees["tp"], spread)
            return max(sum(pieces[i : i + 3]) for i in range(len(pieces)))
        if (
            section.name in ("Adam", "AdamW")
            and section.implementation == "foreach"
            and section.state_dtype == "float32"
        ):
            return held.parameters  # the root of all second moments
        return 0
