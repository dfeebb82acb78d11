"""Layouts with expert parallelism that are refused. What depends on the number of ranks is in config/world.py."""

from config.refusal import Refusal, Said, pipelined, together, zero_bubble
from config.schema import Config
from config.shapes import ModelShape


def _spread(config: Config, shape: ModelShape) -> bool:
    return config.parallelism.expert_parallel_degree > 1 and shape.moe is not None


def _uneven(config: Config, shape: ModelShape, said: Said) -> str:
    if shape.moe is None or shape.moe.num_experts % config.parallelism.expert_parallel_degree == 0:
        return ""
    return f"{said('moe.num_experts')} is not divisible by {said('parallelism.expert_parallel_degree')}"


def _in_parts(config: Config, shape: ModelShape) -> bool:
    return _spread(config, shape) and config.moe.comm_overlap == "experts"


def _one_expert(config: Config, shape: ModelShape) -> bool:
    degree = config.parallelism.expert_parallel_degree
    return _in_parts(config, shape) and shape.moe is not None and shape.moe.num_experts == degree


def _no_ranks(config: Config, shape: ModelShape) -> bool:
    section = config.parallelism
    copies = section.zero_stage in (0, 1) or section.data_parallel_shard_degree == 1
    return (
        _spread(config, shape)
        and copies
        and section.context_parallel_degree == 1
        and section.tensor_parallel_degree == 1
    )


EXPERT_PARALLEL = (
    Refusal(
        "EP, num_experts not divisible",
        "each rank holds an equal share of the experts. Choose a degree that divides them.",
        _uneven,
    ),
    Refusal(
        "EP with whole copies (DDP)",
        "experts are spread over the ranks that shard or cut the rest of the model (dp_shard, cp, tp), and there are"
        " none. Leave data_parallel_shard_degree = -1, without zero_stage 0 or 1.",
        together(_no_ranks, "expert_parallel_degree", "data_parallel_shard_degree", "zero_stage"),
    ),
    Refusal(
        "expert TP other than 1 or TP",
        "tokens are the same within a tensor-parallel group: either each rank of it sends a share of them to whole"
        " experts (1), or all of it shares each expert (the tensor-parallel degree).",
        together(
            lambda config, shape: (
                _spread(config, shape)
                and config.parallelism.expert_tensor_parallel_degree
                not in (1, config.parallelism.tensor_parallel_degree)
            ),
            "expert_tensor_parallel_degree",
            "tensor_parallel_degree",
        ),
    ),
    Refusal(
        "expert TP without EP",
        "without expert parallelism experts are cut over the tensor-parallel ranks. Leave it at 1.",
        together(
            lambda config, shape: (
                config.parallelism.expert_parallel_degree == 1
                and config.parallelism.expert_tensor_parallel_degree > 1
                and shape.moe is not None
            ),
            "expert_tensor_parallel_degree",
            "expert_parallel_degree",
        ),
    ),
    Refusal(
        "overlap with shared experts without any",
        'there is nothing to compute while tokens travel. Set moe.comm_overlap = "none", or moe.num_shared_experts.',
        together(
            lambda config, shape: (
                _spread(config, shape)
                and config.moe.comm_overlap == "shared_expert"
                and shape.moe is not None
                and not shape.moe.num_shared_experts
            ),
            "moe.comm_overlap",
            "moe.num_shared_experts",
        ),
    ),
    Refusal(
        "overlap with experts, a token once a rank",
        "all experts of a rank read the one row of a token, so none can start without it and parts would send it again."
        ' Set moe.dispatcher = "all_to_all", or moe.comm_overlap = "shared_expert".',
        together(
            lambda config, shape: _in_parts(config, shape) and config.moe.dispatcher == "all_to_all_dedup",
            "moe.comm_overlap",
            "moe.dispatcher",
        ),
    ),
    Refusal(
        "overlap with experts, one expert a rank",
        "the experts of a rank are computed in parts, each while tokens of others travel, and one expert is one part."
        ' Choose a smaller degree, or set moe.comm_overlap = "none".',
        together(_one_expert, "moe.comm_overlap", "expert_parallel_degree"),
    ),
    Refusal(
        "EP with zero bubble",
        "the backward pass runs an exchange of tokens in both of its halves, of which one would find its rows gone. Use"
        ' "1F1B" or "Interleaved1F1B".',
        together(
            lambda config, shape: _spread(config, shape) and pipelined(config) and zero_bubble(config),
            "expert_parallel_degree",
            "pipeline_parallel_schedule",
        ),
    ),
)
