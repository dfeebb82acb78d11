"""Data-parallel layouts that are refused: ZeRO stages and degrees are two ways to say one thing, FSDP1 stands alone."""

from collections.abc import Callable

from config.refusal import Finds, Refusal, pipelined, tensor_parallel, together, without_fsdp2
from config.schema import Config, Parallelism
from config.shapes import ModelShape

_PLAIN = Parallelism()
_BETWEEN = ("fsdp_reshard_after_backward", "fsdp_reduce_gradients")


def _changed(condition: Callable[[Config], bool], keys: tuple[str, ...], *others: str) -> Finds:
    """Quote the first of ``keys`` that is not at its default, and ``others``, where ``condition`` holds."""

    def finds(config: Config, shape: ModelShape, said: Callable[[str], str]) -> str:
        for key in keys:
            if getattr(config.parallelism, key) != getattr(_PLAIN, key):
                return together(lambda config, shape: condition(config), key, *others)(config, shape, said)
        return ""

    return finds


DATA_PARALLEL = (
    Refusal(
        "ZeRO 0 or 1 with a shard degree",
        "these stages shard no parameters. Remove one of the two keys.",
        together(
            lambda config, shape: (
                config.parallelism.zero_stage in (0, 1) and config.parallelism.data_parallel_shard_degree > 1
            ),
            "zero_stage",
            "data_parallel_shard_degree",
        ),
    ),
    Refusal(
        "ZeRO 2 or 3 without sharding",
        "these stages shard over all data ranks. Remove one of the two keys.",
        together(
            lambda config, shape: (
                config.parallelism.zero_stage in (2, 3) and config.parallelism.data_parallel_shard_degree == 1
            ),
            "zero_stage",
            "data_parallel_shard_degree",
        ),
    ),
    Refusal(
        "ZeRO 2 or 3 with copies",
        "these stages shard over all data ranks. For HSDP set both degrees and no stage.",
        together(
            lambda config, shape: (
                config.parallelism.zero_stage in (2, 3) and config.parallelism.data_parallel_replicate_degree > 1
            ),
            "zero_stage",
            "data_parallel_replicate_degree",
        ),
    ),
    Refusal(
        "ZeRO stage against resharding",
        "stage 2 means never and stage 3 always; stages 0 and 1 have nothing to free. Remove one of the two keys.",
        together(
            lambda config, shape: (
                (config.parallelism.zero_stage, config.parallelism.fsdp_reshard_after_forward)
                in {(0, "always"), (0, "never"), (1, "always"), (1, "never"), (2, "always"), (3, "never")}
            ),
            "zero_stage",
            "fsdp_reshard_after_forward",
        ),
    ),
    Refusal(
        "ZeRO 1 with TP",
        "torch's ZeroRedundancyOptimizer partitions plain tensors, and tensor parallelism makes sharded ones. Use stage"
        " 2 or 3.",
        together(
            lambda config, shape: config.parallelism.zero_stage == 1 and tensor_parallel(config),
            "zero_stage",
            "tensor_parallel_degree",
        ),
    ),
    Refusal(
        "ZeRO 1 with experts",
        "it hands out whole parameters, and one stack of experts outweighs all others: a rank would keep nearly all"
        " states. Use stage 2 or 3.",
        together(
            lambda config, shape: config.parallelism.zero_stage == 1 and shape.moe is not None,
            "zero_stage",
            "model.flavor",
        ),
    ),
    Refusal(
        "FSDP1 with TP",
        "it is a legacy arm for data parallelism alone. Use fsdp_version = 2.",
        together(
            lambda config, shape: config.parallelism.fsdp_version == 1 and tensor_parallel(config),
            "fsdp_version",
            "tensor_parallel_degree",
        ),
    ),
    Refusal(
        "FSDP1 with copies, or without sharding",
        "it is a legacy arm and shards over all ranks. Use fsdp_version = 2.",
        together(
            lambda config, shape: (
                config.parallelism.fsdp_version == 1
                and (
                    config.parallelism.data_parallel_replicate_degree > 1
                    or config.parallelism.data_parallel_shard_degree == 1
                )
            ),
            "fsdp_version",
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
        ),
    ),
    Refusal(
        "FSDP1 with a ZeRO stage below 3",
        "it is compared with stage 3. Remove one of the two keys.",
        together(
            lambda config, shape: config.parallelism.fsdp_version == 1 and config.parallelism.zero_stage in (0, 1, 2),
            "fsdp_version",
            "zero_stage",
        ),
    ),
    Refusal(
        "FSDP1 with experts",
        "its units have one compute dtype, and routers have their own. Use fsdp_version = 2.",
        together(
            lambda config, shape: config.parallelism.fsdp_version == 1 and shape.moe is not None,
            "fsdp_version",
            "model.flavor",
        ),
    ),
    Refusal(
        "prefetch depth without FSDP2",
        "no parameters are gathered that could come early. Remove fsdp_prefetch_blocks.",
        together(
            lambda config, shape: config.parallelism.fsdp_prefetch_blocks is not None and without_fsdp2(config),
            "fsdp_prefetch_blocks",
            "data_parallel_shard_degree",
        ),
    ),
    Refusal(
        "FSDP2's messages without FSDP2",
        "it sends nothing here that could wait or go another way. Remove the key.",
        _changed(without_fsdp2, (*_BETWEEN, "fsdp_collectives"), "data_parallel_shard_degree"),
    ),
    Refusal(
        "FSDP2 between the micro-batches of a pipeline",
        "its stages keep gathered parameters and whole gradients until the schedule ends. Remove the key.",
        _changed(pipelined, _BETWEEN, "pipeline_parallel_degree"),
    ),
    Refusal(
        "direct collectives with CPU offload",
        "shards in CPU memory are copied to the device to be sent, as one message. Remove one of the two keys.",
        _changed(
            lambda config: config.training.enable_cpu_offload, ("fsdp_collectives",), "training.enable_cpu_offload"
        ),
    ),
)
