"""Ways to save memory that are refused: where activations, parameters and states cannot be kept elsewhere."""

from collections.abc import Callable

from config.refusal import Refusal, compiles, pipelined, tensor_parallel, together, without_fsdp2, zero_bubble
from config.schema import Config

BUDGETED_BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition")
"""Backends of torch.compile that partition a graph by what it saves, and run where the trainer does."""


def _mode(*names: str) -> Callable[[Config], bool]:
    return lambda config: config.activation_checkpoint.mode in names


def _experts_spread(config: Config) -> bool:
    return config.parallelism.expert_parallel_degree > 1


MEMORY = (
    Refusal(
        "memory budget without compiled blocks",
        'it is the compiler that chooses what to recompute. Set compile.enable = true with "model" in'
        ' compile.components and compile.backend = "inductor", or another mode.',
        together(
            lambda config, shape: (
                _mode("memory_budget")(config)
                and not (compiles(config, "model") and config.compile.backend in BUDGETED_BACKENDS)
            ),
            "activation_checkpoint.mode",
            "compile.enable",
            "compile.backend",
        ),
    ),
    Refusal(
        "nested checkpointing of compiled blocks",
        "the compiler makes one recomputation of two, so the mistake would not be made. Set compile.enable = false.",
        together(
            lambda config, shape: _mode("nested")(config) and compiles(config, "model"),
            "activation_checkpoint.mode",
            "compile.enable",
        ),
    ),
    Refusal(
        "checkpointing around experts without any",
        'it would recompute every block whole. Set it to "full".',
        together(
            lambda config, shape: _mode("experts")(config) and shape.moe is None,
            "activation_checkpoint.mode",
            "model.flavor",
        ),
    ),
    Refusal(
        "TP with compiled blocks and checkpointing around experts",
        "torch 2.13 does not compile checkpointing inside of a tensor-parallel block. Set activation_checkpoint.mode ="
        ' "full", or compile.components = ["loss"].',
        together(
            lambda config, shape: _mode("experts")(config) and compiles(config, "model") and tensor_parallel(config),
            "activation_checkpoint.mode",
            "tensor_parallel_degree",
            "compile.enable",
        ),
    ),
    Refusal(
        "activation offload with another choice of what to keep",
        "it moves what whole blocks save, or the inputs of blocks that are recomputed whole. Set the mode to"
        ' "none" or "full".',
        together(
            lambda config, shape: config.activation_checkpoint.offload and not _mode("none", "full")(config),
            "activation_checkpoint.offload",
            "activation_checkpoint.mode",
        ),
    ),
    Refusal(
        "activation offload with TP",
        "a tensor that is spread over ranks is more than its storage, which is all that moves. Set it to false.",
        together(
            lambda config, shape: config.activation_checkpoint.offload and tensor_parallel(config),
            "activation_checkpoint.offload",
            "tensor_parallel_degree",
        ),
    ),
    Refusal(
        "activation offload with EP",
        "experts' matrices are handed to their kernels as views that are not told from activations, and would move as"
        " well. Set it to false.",
        together(
            lambda config, shape: config.activation_checkpoint.offload and _experts_spread(config),
            "activation_checkpoint.offload",
            "expert_parallel_degree",
        ),
    ),
    Refusal(
        "activation offload with zero bubble",
        "the backward pass asks for what was saved twice, in two passes, and it would come back twice. Use"
        ' "1F1B" or "Interleaved1F1B".',
        together(
            lambda config, shape: config.activation_checkpoint.offload and zero_bubble(config),
            "activation_checkpoint.offload",
            "pipeline_parallel_schedule",
        ),
    ),
    Refusal(
        "CPU offload without FSDP2",
        "it is FSDP2's shards that are kept in CPU memory. Shard over at least two ranks with fsdp_version = 2, or set"
        " optimizer.state_offload, which needs one rank.",
        together(
            lambda config, shape: config.training.enable_cpu_offload and without_fsdp2(config),
            "training.enable_cpu_offload",
            "data_parallel_shard_degree",
            "zero_stage",
            "fsdp_version",
        ),
    ),
    Refusal(
        "CPU offload with TP, EP or a pipeline",
        "gradients would have to be reduced over more than FSDP2's ranks after they have left the device. Set it to"
        " false.",
        together(
            lambda config, shape: (
                config.training.enable_cpu_offload
                and (tensor_parallel(config) or _experts_spread(config) or pipelined(config))
            ),
            "training.enable_cpu_offload",
            "tensor_parallel_degree",
            "expert_parallel_degree",
            "pipeline_parallel_degree",
        ),
    ),
    Refusal(
        "CPU offload with float8 all-gather",
        "FSDP2 would quantise shards in CPU memory. Set enable_fsdp_float8_all_gather = false.",
        together(
            lambda config, shape: (
                config.training.enable_cpu_offload and config.quantize.linear.float8.enable_fsdp_float8_all_gather
            ),
            "training.enable_cpu_offload",
            "quantize.linear.float8.enable_fsdp_float8_all_gather",
        ),
    ),
    Refusal(
        "states offloaded twice",
        "under CPU offload states are made where the shards are, in CPU memory. Remove one of the two keys.",
        together(
            lambda config, shape: config.training.enable_cpu_offload and config.optimizer.state_offload,
            "training.enable_cpu_offload",
            "optimizer.state_offload",
        ),
    ),
    Refusal(
        "offload of states with ZeRO 1",
        "torch's ZeroRedundancyOptimizer updates all parameters of a rank at once. Use stage 0, 2 or 3.",
        together(
            lambda config, shape: config.optimizer.state_offload and config.parallelism.zero_stage == 1,
            "optimizer.state_offload",
            "zero_stage",
        ),
    ),
    Refusal(
        "offload of states with a compiled update",
        'the compiled update takes all parameters at once. Leave "optimizer" out of compile.components.',
        together(
            lambda config, shape: (
                config.optimizer.state_offload and config.compile.enable and "optimizer" in config.compile.components
            ),
            "optimizer.state_offload",
            "compile.components",
        ),
    ),
    Refusal(
        "offload of states in bfloat16",
        "that update may round by chance, by a parameter's place among all, and would be given some at a time. Remove"
        " one of the two keys.",
        together(
            lambda config, shape: config.optimizer.state_offload and config.optimizer.state_dtype != "float32",
            "optimizer.state_offload",
            "optimizer.state_dtype",
        ),
    ),
    Refusal(
        "offload of states that an optimizer does not keep",
        "plain SGD keeps none. Set it to false.",
        together(
            lambda config, shape: config.optimizer.state_offload and config.optimizer.name == "SGD",
            "optimizer.state_offload",
            "optimizer.name",
        ),
    ),
)
