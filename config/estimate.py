"""Peak active memory of a rank, foreseen: a formula on a configuration, without torch and without a device.

A step has four moments at which memory may be fullest: at the loss and in the last block's backward pass (all
activations), in the first block's backward pass (all gradients), and in the optimizer's step. Between the middle two,
activations go and gradients come at one pace. Each moment is a sum of parts. What is exact
(weights, gradients, states: config/memory.py; the loss: config/loss.py) is counted as it is; what depends on the
compiler and on kernels (config/saved_tensors.py) is multiplied by a coefficient of
config/memory_coefficients.json, which ``python -m benchmarks.memory_fit`` writes with where it comes from.

Active memory is what tensors hold. The allocator reserves more, by its fragmentation; the CUDA context comes on top.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from config.arithmetic import tensors
from config.flavors import resolve_shape
from config.loss import loss_implementation, loss_peak_bytes
from config.memory import ExpertDegrees, Memory, expert_spread, local_shapes, memory
from config.pipeline import micro_batches, rank_modules
from config.refusal import compiled, compiles
from config.saved_tensors import Block, Kernels, Numbers, block
from config.schema import Config
from config.shapes import ModelShape
from config.world import derived, mesh_degrees

TABLE = Path(__file__).with_name("memory_coefficients.json")
NAMES = ("eager", "compiled", "experts", "casts", "working", "loss")
"""Coefficients. 1 is what was counted, except ``casts``: the share of weights that compiled blocks keep in bfloat16."""
BLOCKS_ON_DEVICE = 2
"""Blocks whose activations are on the device under offload (parallelisms/activation_offload.py)."""
STATE_PIECES = 3 * 2**28
"""Bytes of offloaded states on the device during an update (trainer/state_offload.py)."""
RECOMPUTED = ("full", "nested")


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


@dataclass(frozen=True)
class Estimate:
    """The moments of the fullest rank."""

    moments: tuple[Moment, ...]
    coefficients: dict[str, float]

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.size(self.coefficients))

    @property
    def peak(self) -> int:
        """Bytes."""
        return round(self.fullest.size(self.coefficients))

    def parts(self) -> dict[str, int]:
        """Name -> bytes at the fullest moment, scaled, without what is not there."""
        found: dict[str, int] = {}
        for part in self.fullest.parts:
            size = round(part.size * self.coefficients.get(part.coefficient, 1.0))
            if size:
                found[part.name] = found.get(part.name, 0) + size
        return found


@functools.cache
def coefficient_table() -> dict[str, Any]:
    """The file: ``coefficients``, ``fitted_on`` (rows; empty where nothing was measured), ``worst_unseen_percent``."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def provenance() -> str:
    """A few words on how far the estimate is to be trusted."""
    table = coefficient_table()
    if not table["fitted_on"]:
        return "unfitted: counted tensor by tensor, never measured"
    return (
        f"fitted on {len(table['fitted_on'])} runs ({table['gpu']}, torch {table['torch']}); off by at most"
        f" {table['worst_unseen_percent']:.1f} % on {len(table['unseen'])} others"
    )


def held_by(config: Config, degrees: dict[str, int], modules: Collection[str] | None) -> Memory:
    """Weights, gradients and states of the rank that holds ``modules`` (None: all), in float32."""
    return memory(
        resolve_shape(config.model, config.moe),
        config.optimizer.name,
        degrees["dp_shard"] * degrees["cp"],
        tensor_degree=degrees["tp"],
        state_degree=degrees["dp_replicate"] if config.parallelism.zero_stage == 1 else 1,
        expert_degrees=expert_spread(degrees),
        modules=modules,
    )


def estimate(config: Config, world_size: int, coefficients: dict[str, float] | None = None) -> Estimate:
    """The peak of the fullest of ``world_size`` ranks. Data are without documents' masks, experts' load is even.

    Args:
        coefficients: None: those of the table.

    Raises:
        ConfigError: as :func:`config.world.derived`.
    """
    numbers, degrees = coefficients or coefficient_table()["coefficients"], mesh_degrees(config, world_size)
    accumulation = derived(config, world_size)["gradient_accumulation_steps"].value
    n_layers = resolve_shape(config.model, config.moe).n_layers
    if degrees["pp"] == 1:
        return Estimate(_Rank(config, degrees, None, 1, accumulation > 1).moments(), numbers)
    runs, ranks = micro_batches(config, accumulation), []
    naive = config.parallelism.pipeline_parallel_schedule == "naive"
    for place, modules in enumerate(rank_modules(config.parallelism, n_layers)):
        flying = runs if config.parallelism.pipeline_parallel_schedule == "GPipe" else min(runs, degrees["pp"] - place)
        ranks.append(Estimate(_Rank(config, degrees, modules, 1 if naive else flying, runs > 1).moments(), numbers))
    return max(ranks, key=lambda each: each.peak)


@dataclass(frozen=True)
class _Rank:
    """What one rank does: ``modules`` (None: all), ``flying`` micro-batches between their forward and backward passes,
    gradients of earlier ones kept (``accumulates``)."""

    config: Config
    degrees: dict[str, int]
    modules: Collection[str] | None
    flying: int
    accumulates: bool

    def moments(self) -> tuple[Moment, ...]:
        held, config = held_by(self.config, self.degrees, self.modules), self.config
        offload, section = config.training.enable_cpu_offload, config.optimizer
        weights = Part("weights", 0 if offload else held.parameters)
        gradients = Part("gradients", 0 if offload else held.gradients)
        size = held.optimizer_states // (2 if section.state_dtype == "bfloat16" else 1)
        states = Part("optimizer states", 0 if offload or section.state_offload else size)
        here = (weights, states)
        kept = (*here, *((gradients,) if self.accumulates else ()), *self._activations())
        found = [Moment("in the optimizer step", (*here, gradients, Part("update", self._update(held))))]
        if layers := self._layers():
            found.append(Moment("in the first block's backward pass", (*here, gradients, *self._backward(layers[0]))))
            head = Part("gradients", 0 if self.accumulates or not self._has_head else self._head_gradient())
            last = self._backward(layers[-1], kept=self._kept(len(layers) - 1, layers[-1]))
            found.append(Moment("in the last block's backward pass", (*kept, head, *last)))
        if self._has_head:
            found.append(Moment("at the loss", (*kept, *self._loss())))
        return tuple(found)

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
        return Numbers(compute, compute if self.sharded else 4, not self.sharded and compute == 2, self.degrees["tp"])

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
        kernels = Kernels(config.training.seq_len if keeps_scores else 0, liger.rms_norm, liger.swiglu)
        moe = self.shape.moe
        return block(self.shape, self.numbers, kernels, with_experts=moe is not None and moe.has_experts(layer))

    def _kept(self, place: int, layer: int) -> tuple[float, float, float]:
        """Bytes a token that block ``layer``, the ``place``-th, keeps: exact, scaled as activations, as experts'."""
        section, each = self.config.activation_checkpoint, self._block(layer)
        mode, inside = section.mode, each.compiled if compiled(self.config) else each.eager
        rest = inside - each.boundary - each.experts
        if mode == "selective" and section.selective_ac_option == "op":
            return each.boundary, each.operators - each.boundary - each.experts, each.experts
        if mode == "experts" and each.experts:
            return 2 * each.boundary, 0.0, each.experts
        if mode == "memory_budget":
            return each.boundary, section.memory_budget * rest, section.memory_budget * each.experts
        every = int(section.selective_ac_option) if mode == "selective" else 1
        if mode in (*RECOMPUTED, "experts") or (mode == "selective" and place % every == 0):
            return each.boundary, 0.0, 0.0
        return each.boundary, rest, each.experts

    def _keeps_weights(self, place: int) -> bool:
        """Whether what block ``place`` saves includes its matrices in the compute dtype."""
        section = self.config.activation_checkpoint
        every = section.selective_ac_option
        return section.mode == "none" or (section.mode == "selective" and every != "op" and place % int(every) != 0)

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
            self._casts([place for place in range(len(layers)) if self._keeps_weights(place)]),
            Part("gathered blocks", self._gathered()),
        )

    def _casts(self, places: list[int]) -> Part:
        """Weights in the compute dtype, which a forward pass under autocast leaves behind: without a compiler all of
        them, checkpointed or not, as autocast's cache lives as long as the pass."""
        if not self.numbers.autocast:
            return Part("weights in bfloat16", 0)
        layers = self._layers()
        counts = [self._matrices(layer) for layer in layers]
        if compiled(self.config):
            return Part("weights in bfloat16", 2 * sum(counts[place] for place in places), "casts")
        return Part("weights in bfloat16", 2 * sum(counts))

    def _matrices(self, layer: int) -> int:
        """Elements of one block's matrices on this rank."""
        degrees = expert_spread(self.degrees)
        spread = degrees or ExpertDegrees(1, self.degrees["tp"], 1)
        found = 0
        for t in tensors(self.shape, [layer]):
            if t.kind == "linear":
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
        arriving = self._matrices(layer) * self.numbers.compute  # gradients, before they are float32
        reduced = 4 * self._matrices(layer) if self._gathered() else 0
        return (
            Part("activations", tokens * max(0.0, each.boundary - kept[0])),
            Part("activations", tokens * max(0.0, inside - kept[1]), mode),
            Part("activations", tokens * max(0.0, each.experts - kept[2]), "experts"),
            Part("gradients of activations", tokens * each.working + arriving, "working"),
            Part("gathered blocks", self._gathered() + reduced),
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
        )
        return (Part("activations", self.tokens * self.shape.dim * (2 * n.residual + c)), Part("loss", size, "loss"))

    def _update(self, held: Memory) -> int:
        """What the optimizer's step takes for itself."""
        section = self.config.optimizer
        if self.config.training.enable_cpu_offload:
            return 0
        if section.state_offload:
            return STATE_PIECES
        if (
            section.name in ("Adam", "AdamW")
            and section.implementation == "foreach"
            and section.state_dtype == "float32"
        ):
            return held.parameters  # the root of all second moments
        return 0


ENDS = ("tok_embeddings", "norm", "output")
