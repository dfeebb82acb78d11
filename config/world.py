"""What depends on the number of ranks: degrees of parallelism, gradient accumulation, tokens a step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod

from config.errors import ConfigError
from config.flavors import resolve_shape
from config.keys import shown
from config.pipeline import micro_batches, pipeline_rules
from config.profiling_rules import check_profiled_ranks
from config.schema import Config

DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
}
"""Axis of the mesh -> key of [parallelism], in the order of the mesh. Each axis multiplies the number of ranks."""
DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks read different sequences."""


@dataclass(frozen=True)
class Derived:
    """A number that no key holds, and the rule that gave it."""

    value: int
    rule: str


def world_size_from(environment: Mapping[str, str] = os.environ) -> int | None:
    """Ranks of the run: torchrun's WORLD_SIZE, else the launcher's NGPU x NNODES, else None.

    Raises:
        ConfigError: one of them is not a number of at least 1.
    """
    if "WORLD_SIZE" in environment:
        return _positive(environment, "WORLD_SIZE")
    if "NGPU" in environment:
        return _positive(environment, "NGPU") * (_positive(environment, "NNODES") if "NNODES" in environment else 1)
    return None


def _positive(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} = {shown(text)} (environment): expected a whole number of at least 1")
    return int(text)


def smallest_world(config: Config) -> int:
    """The fewest ranks that the set degrees allow: their product, a derived degree counting as 1, or more where experts
    need them.
    """
    degrees = {axis: max(1, getattr(config.parallelism, key)) for axis, key in DEGREES.items()}
    outer = degrees["pp"] * degrees["dp_replicate"]
    section = config.parallelism
    experts = section.expert_parallel_degree * section.expert_tensor_parallel_degree
    if section.expert_parallel_degree == 1 or resolve_shape(config.model, config.moe).moe is None:
        experts = 1
    return outer * lcm(prod(degrees.values()) // outer, experts)


def mesh_degrees(config: Config, world_size: int) -> dict[str, int]:
    """Axis -> degree for ``world_size`` ranks: ``data_parallel_shard_degree = -1`` is derived, and under ``zero_stage``
    0 and 1 the replicate degree is. Axes ep and etp divide the ranks along dp_shard to tp once more.

    Raises:
        ConfigError: the degrees do not multiply to the number of ranks, or experts do not share them out.
    """
    degrees = {axis: getattr(config.parallelism, key) for axis, key in DEGREES.items()}
    if config.parallelism.zero_stage in (0, 1):
        degrees["dp_shard"] = 1
        others = prod(n for axis, n in degrees.items() if axis != "dp_replicate")
        if degrees["dp_replicate"] == 1 and world_size % others == 0:
            degrees["dp_replicate"] = world_size // others
    fixed = prod(n for n in degrees.values() if n != -1)
    product = " x ".join(f"{axis}({n})" for axis, n in degrees.items() if n not in (-1, 1)) or "dp_shard(1)"
    if degrees["dp_shard"] == -1:
        if world_size % fixed:
            raise ConfigError(
                f"parallelism: {product} does not divide WORLD_SIZE {world_size}. {_advice(degrees, world_size)}"
            )
        return _with_experts(config, degrees | {"dp_shard": world_size // fixed})
    if fixed != world_size:
        raise ConfigError(
            f"parallelism: {product} = {fixed} but WORLD_SIZE is {world_size}. {_advice(degrees, world_size)}"
        )
    return _with_experts(config, degrees)


def _with_experts(config: Config, degrees: dict[str, int]) -> dict[str, int]:
    """``degrees`` and those of the experts' axes ep and etp, 1 without expert parallelism or experts.

    Raises:
        ConfigError: the ranks that experts are spread over do not share out.
    """
    ep, etp = config.parallelism.expert_parallel_degree, config.parallelism.expert_tensor_parallel_degree
    if ep == 1 or resolve_shape(config.model, config.moe).moe is None:
        return degrees | {"ep": 1, "etp": 1}
    folded = {axis: n for axis, n in degrees.items() if axis not in ("pp", "dp_replicate")}
    ranks = prod(folded.values())
    if ranks % (ep * etp):
        fits = [n for n in range(1, ranks + 1) if ranks % (n * etp) == 0]
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {ep}: experts are spread over"
            f" {' x '.join(f'{axis}({n})' for axis, n in folded.items())} = {ranks} ranks"
            f"{f', and {etp} share each expert' if etp > 1 else ''}. Choose a degree that divides them:"
            f" {', '.join(map(str, fits))}."
        )
    shape, shards = resolve_shape(config.model, config.moe), ranks // (ep * etp)
    if shape.moe is not None and (shape.moe.num_experts // ep) % shards and shape.dim % shards:
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {ep}: {shards} ranks shard the {shape.moe.num_experts // ep} experts"
            f" of each share, and neither their number nor model.dim = {shape.dim} is divisible by {shards}."
            " Choose another degree, or copies (data_parallel_replicate_degree)."
        )
    return degrees | {"ep": ep, "etp": etp}


def _advice(degrees: dict[str, int], world_size: int) -> str:
    others = prod(n for axis, n in degrees.items() if axis != "dp_shard")
    if world_size % others == 0:
        return f"Set data_parallel_shard_degree = -1 to derive it ({world_size // others})."
    fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
    return (
        f"Choose degrees that divide {world_size}: {', '.join(map(str, fits))}; or launch {others} or a multiple of it."
    )


def check_world(config: Config, world_size: int) -> dict[str, int]:
    """Check the degrees and the global batch against the number of ranks.

    Returns:
        Axis -> degree.

    Raises:
        ConfigError: with the numbers and the nearest batch sizes that fit.
    """
    degrees = mesh_degrees(config, world_size)
    if config.training.enable_cpu_offload and degrees["dp_shard"] * degrees["cp"] == 1:
        raise ConfigError(
            "training.enable_cpu_offload = true keeps FSDP2's shards in CPU memory, and with WORLD_SIZE"
            f" {world_size} nothing is sharded. Shard over two ranks or more, or set optimizer.state_offload."
        )
    size, local = config.training.global_batch_size, config.training.local_batch_size
    data_degree = prod(degrees[axis] for axis in DATA_AXES)
    if size != -1 and size % (local * data_degree):
        below = size // (local * data_degree) * local * data_degree
        fits = [str(n) for n in (below, below + local * data_degree) if n > 0]
        smaller = [n for n in range(local - 1, 0, -1) if size % (n * data_degree) == 0]
        also = f", or training.local_batch_size = {smaller[0]}" if smaller else ""
        raise ConfigError(
            f"training.global_batch_size = {size} is not divisible by local_batch_size({local}) x"
            f" data-parallel degree({data_degree}) = {local * data_degree}."
            f" Set training.global_batch_size = {' or '.join(fits)}{also}."
        )
    accumulation = 1 if size == -1 else size // (local * data_degree)
    broken = list(pipeline_rules(config, resolve_shape(config.model, config.moe), accumulation))
    if broken:
        raise ConfigError("\n".join(broken))
    check_profiled_ranks(config, world_size)
    return degrees


def derived(config: Config, world_size: int) -> dict[str, Derived]:
    """What follows from the configuration and the number of ranks, each with its rule, in reading order.

    Raises:
        ConfigError: as :func:`check_world`.
    """
    degrees = check_world(config, world_size)
    training = config.training
    data_degree = prod(degrees[axis] for axis in DATA_AXES)
    size = training.global_batch_size
    global_batch = local_times_degree = training.local_batch_size * data_degree
    if size != -1:
        global_batch = size
    accumulation = global_batch // local_times_degree
    axes = " x ".join(DATA_AXES)
    pipeline = {}
    if degrees["pp"] > 1:
        rule = "gradient_accumulation_steps"
        if config.parallelism.pipeline_parallel_schedule != "naive":
            rule += " x local_batch_size / pipeline_parallel_microbatch_size"
        pipeline["pipeline_micro_batches"] = Derived(micro_batches(config, accumulation), rule)
    local_experts, moe = {}, resolve_shape(config.model, config.moe).moe
    if moe is not None and degrees["ep"] > 1:
        local_experts["local_experts"] = Derived(
            moe.num_experts // degrees["ep"], "num_experts / expert_parallel_degree"
        )
    return {
        "data_parallel_degree": Derived(data_degree, axes),
        "global_batch_size": Derived(
            global_batch, "local_batch_size x data_parallel_degree" if size == -1 else "training.global_batch_size"
        ),
        "gradient_accumulation_steps": Derived(
            accumulation, "global_batch_size / (local_batch_size x data_parallel_degree)"
        ),
        **pipeline,
        **local_experts,
        "tokens_per_step": Derived(global_batch * training.seq_len, "global_batch_size x seq_len"),
        "tokens": Derived(global_batch * training.seq_len * training.steps, "tokens_per_step x steps"),
    }


def check_devices(ngpu: int, available: int, device: str) -> None:
    """Refuse more ranks on this machine than it has GPUs. Ranks on a CPU (``device = "cpu"``) are not limited.

    Raises:
        ConfigError: with both numbers.
    """
    if device != "cpu" and ngpu > available:
        plural = "GPU" if available == 1 else "GPUs"
        raise ConfigError(
            f"NGPU = {ngpu} but this machine has {available} {plural}. Set NGPU={available}, or use more machines."
        )
