"""Bytes a rank holds: weights, gradients and optimizer states, and what each stage of ZeRO saves of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from config.arithmetic import tensors
from config.flavors import ModelShape

FLOAT32_BYTES = 4
STATES_OF = {"AdamW": 2, "Adam": 2, "SGD": 0}
"""float32 optimizer states a parameter has: both moments of Adam; plain SGD keeps none."""
PIECE_BYTES = 2**28
"""Offloaded states that are updated at once, at most, unless one parameter has more (trainer/state_offload.py)."""
MOMENTS = ("after forward", "after backward", "in the optimizer step")


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank. Activations, gathered blocks and the allocator's own needs come on top."""

    parameters: int
    gradients: int
    optimizer_states: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_states


@dataclass(frozen=True)
class ExpertDegrees:
    """How expert parallelism spreads experts: ``ep`` shares of them, each expert in ``etp`` parts, ``efsdp`` shards."""

    ep: int
    etp: int
    efsdp: int


def expert_spread(degrees: dict[str, int]) -> ExpertDegrees | None:
    """How a mesh of these ``degrees`` (config/world.py) spreads experts; None without expert parallelism."""
    ep, etp = degrees["ep"], degrees["etp"]
    if ep == 1:
        return None
    return ExpertDegrees(ep, etp, degrees["dp_shard"] * degrees["cp"] * degrees["tp"] // (ep * etp))


def memory(
    shape: ModelShape,
    optimizer: str,
    shard_degree: int = 1,
    *,
    tensor_degree: int = 1,
    state_degree: int = 1,
    state_bytes: int = FLOAT32_BYTES,
    expert_degrees: ExpertDegrees | None = None,
    modules: Collection[str] | None = None,
) -> Memory:
    """Float32 weights and gradients of a rank, and states of ``state_bytes`` an element.

    Tensor parallelism cuts matrices in ``tensor_degree`` parts; FSDP cuts what is left of each parameter along its
    first dimension into ``shard_degree`` parts, the first of them the largest. DDP (``shard_degree`` 1) holds whole
    copies; HSDP is FSDP over its shard degree. ZeRO stage 1 hands the states of whole parameters to ``state_degree``
    ranks. Expert parallelism spreads experts by ``expert_degrees`` instead. Of a pipeline a rank holds the ``modules``
    of its stages (config/pipeline.py).
    """
    shapes = local_shapes(shape, tensor_degree, modules, experts=expert_degrees is None)
    elements = sum(-(-s[0] // shard_degree) * prod(s[1:]) for s in shapes)
    if expert_degrees is not None:
        elements += _expert_elements(shape, modules, expert_degrees)
    size = FLOAT32_BYTES * elements
    kept = elements if state_degree == 1 else _fullest([prod(s) for s in shapes], state_degree)
    return Memory(parameters=size, gradients=size, optimizer_states=state_bytes * kept * STATES_OF[optimizer])


def state_pieces(
    shape: ModelShape,
    modules: Collection[str] | None,
    shard_degree: int,
    tensor_degree: int,
    expert_degrees: ExpertDegrees | None,
) -> list[int]:
    """Bytes of Adam's states in each piece of an update whose states wait in CPU memory, in the order of parameters.

    Arguments as of :func:`memory`.
    """
    if modules is None:
        ends = ["norm"] if shape.enable_weight_tying else ["norm", "output"]
        modules = ["tok_embeddings", *(f"layers.{i}" for i in range(shape.n_layers)), *ends]
    each = STATES_OF["AdamW"] * FLOAT32_BYTES
    found = [0]
    for module in modules:
        shapes = local_shapes(shape, tensor_degree, [module], experts=expert_degrees is None)
        sizes = [each * -(-s[0] // shard_degree) * prod(s[1:]) for s in shapes]
        if expert_degrees is not None:
            degree = expert_degrees.ep * expert_degrees.etp * expert_degrees.efsdp
            sizes += [each * t.numel // degree for t in tensors(shape, _layers([module])) if t.expert]
        for size in sizes:
            if found[-1] + size > PIECE_BYTES:
                found.append(0)
            found[-1] += size
    return found


def zero_table(
    shape: ModelShape, optimizer: str, ranks: int, *, compute_bytes: int, tensor_degree: int = 1
) -> dict[int, dict[str, int]]:
    """ZeRO stage -> moment of a step -> bytes on the fullest rank, without activations.

    What FSDP2 has gathered counts: ``compute_bytes`` an element, after forward everything in stage 2 and the last unit
    in stage 3. After backward both hold shards alone, so stage 2 here is ZeRO-2 in what it sends, not in what it
    keeps: the paper's stage keeps whole parameters throughout.
    """
    shapes = local_shapes(shape, tensor_degree)
    last = [(shape.vocab_size // tensor_degree, shape.dim), (shape.dim,)]  # head, or the embedding that serves; norm
    found = {}
    for stage in range(4):
        shards = ranks if stage > 1 else 1
        held = memory(shape, optimizer, shards, tensor_degree=tensor_degree, state_degree=ranks if stage == 1 else 1)
        gathered = {2: shapes, 3: last}.get(stage, [])
        extra = compute_bytes * sum(-(-s[0] // ranks) * ranks * prod(s[1:]) for s in gathered)
        found[stage] = dict(
            zip(MOMENTS, (held.parameters + extra, held.parameters + held.gradients, held.total), strict=True)
        )
    return found


def _expert_elements(shape: ModelShape, modules: Collection[str] | None, degrees: ExpertDegrees) -> int:
    """Elements of the routed experts that a rank holds; their shards are equal (config/world.py)."""
    return sum(t.numel for t in tensors(shape, _layers(modules)) if t.expert) // (
        degrees.ep * degrees.etp * degrees.efsdp
    )


def _layers(modules: Collection[str] | None) -> list[int] | None:
    """Indices of the blocks among ``modules``; None for all."""
    if modules is None:
        return None
    return [int(name.removeprefix("layers.")) for name in modules if name.startswith("layers.")]


def local_shapes(
    shape: ModelShape, tensor_degree: int, modules: Collection[str] | None = None, *, experts: bool = True
) -> list[tuple[int, ...]]:
    """Every parameter as one rank of a tensor-parallel group holds it; of ``modules`` alone, if given; those of routed
    experts too, or not.
    """
    ends = {"embedding": 1, "final norm": 1, "head": 1}
    if modules is not None:
        ends = {"embedding": "tok_embeddings" in modules, "final norm": "norm" in modules, "head": "output" in modules}
        if shape.enable_weight_tying:  # the stage of the head holds the matrix as well
            ends["embedding"] += ends["head"]
    found = []
    for tensor in tensors(shape, _layers(modules)):
        if tensor.expert and not experts:
            continue
        local = tuple(n // tensor_degree if i == tensor.cut else n for i, n in enumerate(tensor.shape))
        found += [local] * (tensor.count * ends.get(tensor.role, 1))
    return found


def _fullest(sizes: list[int], ranks: int) -> int:
    """The largest sum when each size, largest first, goes to the rank that has least (ZeroRedundancyOptimizer)."""
    held = [0] * ranks
    for size in sorted(sizes, reverse=True):
        held[held.index(min(held))] += size
    return max(held)
