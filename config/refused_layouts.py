"""Layouts that are refused, each with its reason, before a device or a process group is touched.

``REFUSED`` is the one list: config/layouts.py checks it, docs/parallelisms.md shows it, and tests hold the three
together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from config.pipeline import SCHEDULES, reshard_after_forward
from config.schema import Config
from config.shapes import ModelShape

Said = Callable[[str], str]
Finds = Callable[[Config, ModelShape, Said], str]
"""(configuration, shape, how to quote a key) -> what is wrong, with the numbers, as the start of a sentence that
:attr:`Refusal.reason` continues; empty where the layout is another one.
"""


@dataclass(frozen=True)
class Refusal:
    """A layout, why it cannot be and the way out, and how to recognise it."""

    layout: str
    reason: str
    finds: Finds


def _together(condition: Callable[[Config, ModelShape], bool], *keys: str) -> Finds:
    """Quote ``keys`` where ``condition`` holds."""

    def finds(config: Config, shape: ModelShape, said: Said) -> str:
        return " with ".join(said(f"parallelism.{k}" if "." not in k else k) for k in keys) * condition(config, shape)

    return finds


def _does_not_divide(key: str, size: Callable[[Config, ModelShape], int]) -> Finds:
    """Quote ``key`` where ``size`` is not a multiple of the tensor-parallel degree."""

    def finds(config: Config, shape: ModelShape, said: Said) -> str:
        n = config.parallelism.tensor_parallel_degree
        if size(config, shape) % n == 0:
            return ""
        return f"{said(key)} is not divisible by {said('parallelism.tensor_parallel_degree')}"

    return finds


def _without_fsdp2(config: Config) -> bool:
    """Whether it is certain, for any number of ranks, that FSDP2 holds nothing."""
    section = config.parallelism
    degree = 1 if section.zero_stage in (0, 1) else section.data_parallel_shard_degree
    return section.fsdp_version == 1 or (degree == 1 and section.tensor_parallel_degree == 1)


def _compiled(config: Config) -> bool:
    compile_ = config.compile
    return compile_.enable and "model" in compile_.components and compile_.backend == "inductor"


def _tp(config: Config) -> bool:
    return config.parallelism.tensor_parallel_degree > 1


def _pp(config: Config) -> bool:
    return config.parallelism.pipeline_parallel_degree > 1


def _zero_bubble(config: Config) -> bool:
    return _pp(config) and SCHEDULES[config.parallelism.pipeline_parallel_schedule].splits_backward


REFUSED: tuple[Refusal, ...] = (
    Refusal(
        "ZeRO-1 with checkpoints",
        "its states live in torch's ZeroRedundancyOptimizer, which torch.distributed.checkpoint cannot read. Use"
        " zero_stage = 3, or no checkpoints.",
        _together(
            lambda config, shape: config.parallelism.zero_stage == 1 and config.checkpoint.enable,
            "zero_stage",
            "checkpoint.enable",
        ),
    ),
    # Tensor parallelism
    Refusal(
        "TP, n_heads not divisible",
        "each rank computes whole heads. Choose a degree that divides the heads.",
        _does_not_divide("model.n_heads", lambda config, shape: shape.n_heads),
    ),
    Refusal(
        "TP, n_kv_heads not divisible",
        "each rank holds whole key and value heads; copying them would make their gradients partial sums. Choose a"
        " flavor with more of them, or a lower degree.",
        _does_not_divide("model.n_kv_heads", lambda config, shape: shape.n_kv_heads),
    ),
    Refusal(
        "TP, feed-forward width not divisible",
        "each rank holds an equal share of the hidden features. Choose another width, or a degree that divides it.",
        _does_not_divide("model.hidden_dim", lambda config, shape: shape.hidden_dim),
    ),
    Refusal(
        "TP, expert width not divisible",
        "each rank holds an equal share of every expert's hidden features. Choose another width or degree.",
        _does_not_divide("moe.hidden_dim", lambda config, shape: shape.moe.hidden_dim if shape.moe else 0),
    ),
    Refusal(
        "TP, vocabulary not divisible",
        "embedding, head and loss are split by equal shares of the vocabulary. Pad model.vocab_size to a multiple.",
        _does_not_divide("model.vocab_size", lambda config, shape: shape.vocab_size),
    ),
    Refusal(
        "TP, sequence not divisible",
        "between matrices each rank holds an equal share of the sequence. Choose a multiple.",
        _does_not_divide("training.seq_len", lambda config, shape: config.training.seq_len),
    ),
    Refusal(
        "asynchronous TP without torch.compile (inductor)",
        "it is the compiler that takes products and collectives apart. Set compile.enable = true, with"
        ' compile.backend = "inductor" and "model" in compile.components.',
        _together(
            lambda config, shape: (
                config.parallelism.enable_async_tensor_parallel and _tp(config) and not _compiled(config)
            ),
            "enable_async_tensor_parallel",
            "compile.enable",
            "compile.backend",
        ),
    ),
    Refusal(
        "TP with compiled blocks and checkpointing by operator",
        "torch 2.13 hands the backward pass of such a block a DeviceMesh where it expects a tensor, and stops. Set"
        ' activation_checkpoint.mode = "full" or a number of blocks, or compile.components = ["loss"].',
        _together(
            lambda config, shape: (
                _tp(config)
                and config.compile.enable
                and "model" in config.compile.components
                and config.activation_checkpoint.mode == "selective"
                and config.activation_checkpoint.selective_ac_option == "op"
            ),
            "tensor_parallel_degree",
            "compile.enable",
            "activation_checkpoint.selective_ac_option",
        ),
    ),
    # ZeRO stages and data-parallel degrees: two ways to say one thing
    Refusal(
        "ZeRO 0 or 1 with a shard degree",
        "these stages shard no parameters. Remove one of the two keys.",
        _together(
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
        _together(
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
        _together(
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
        _together(
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
        _together(
            lambda config, shape: config.parallelism.zero_stage == 1 and _tp(config),
            "zero_stage",
            "tensor_parallel_degree",
        ),
    ),
    Refusal(
        "ZeRO 1 with experts",
        "it hands out whole parameters, and one stack of experts outweighs all others: a rank would keep nearly all"
        " states. Use stage 2 or 3.",
        _together(
            lambda config, shape: config.parallelism.zero_stage == 1 and shape.moe is not None,
            "zero_stage",
            "model.flavor",
        ),
    ),
    # FSDP1
    Refusal(
        "FSDP1 with TP",
        "it is a legacy arm for data parallelism alone. Use fsdp_version = 2.",
        _together(
            lambda config, shape: config.parallelism.fsdp_version == 1 and _tp(config),
            "fsdp_version",
            "tensor_parallel_degree",
        ),
    ),
    Refusal(
        "FSDP1 with copies, or without sharding",
        "it is a legacy arm and shards over all ranks. Use fsdp_version = 2.",
        _together(
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
        _together(
            lambda config, shape: config.parallelism.fsdp_version == 1 and config.parallelism.zero_stage in (0, 1, 2),
            "fsdp_version",
            "zero_stage",
        ),
    ),
    Refusal(
        "FSDP1 with experts",
        "its units have one compute dtype, and routers have their own. Use fsdp_version = 2.",
        _together(
            lambda config, shape: config.parallelism.fsdp_version == 1 and shape.moe is not None,
            "fsdp_version",
            "model.flavor",
        ),
    ),
    Refusal(
        "prefetch depth without FSDP2",
        "no parameters are gathered that could come early. Remove fsdp_prefetch_blocks.",
        _together(
            lambda config, shape: config.parallelism.fsdp_prefetch_blocks is not None and _without_fsdp2(config),
            "fsdp_prefetch_blocks",
            "data_parallel_shard_degree",
        ),
    ),
    # Pipelines; rules of stages and micro-batches, with their numbers, are in config/pipeline.py
    Refusal(
        "zero bubble with activation checkpointing",
        "gradients of inputs and of weights are computed in two passes, and both would recompute what was not kept"
        ' (torchtitan #773). Set the mode to "none", or use "1F1B" or "Interleaved1F1B".',
        _together(
            lambda config, shape: _zero_bubble(config) and config.activation_checkpoint.mode != "none",
            "pipeline_parallel_schedule",
            "activation_checkpoint.mode",
        ),
    ),
    Refusal(
        "zero bubble with compiled blocks",
        "the schedule takes the autograd graph apart between a layer's inputs and its weights, and a compiled block is"
        ' one node of it (torchtitan #3584). Set compile.components = ["loss"], or use "1F1B" or "Interleaved1F1B".',
        _together(
            lambda config, shape: (
                _zero_bubble(config) and config.compile.enable and "model" in config.compile.components
            ),
            "pipeline_parallel_schedule",
            "compile.enable",
        ),
    ),
    Refusal(
        "zero bubble with resharding after forward",
        "gradients of weights are added to gathered parameters in a pass of its own, and the forward pass of another"
        " micro-batch has freed these by then: gradients are lost. Leave fsdp_reshard_after_forward at its default,"
        ' which keeps them in a pipeline, or use "1F1B" or "Interleaved1F1B".',
        _together(
            lambda config, shape: _zero_bubble(config) and reshard_after_forward(config) != "never",
            "pipeline_parallel_schedule",
            "fsdp_reshard_after_forward",
            "zero_stage",
        ),
    ),
    Refusal(
        "pipeline with experts",
        "loads and balance losses are summed and reported over all ranks, of which each would hold other layers. Set"
        " pipeline_parallel_degree = 1.",
        _together(
            lambda config, shape: _pp(config) and shape.moe is not None,
            "pipeline_parallel_degree",
            "model.flavor",
        ),
    ),
    Refusal(
        "pipeline with exact global load",
        "the load comes from a forward pass of the whole model before the step, and no schedule has one. Set"
        ' moe.f_source = "running" or "previous_step".',
        _together(
            lambda config, shape: (
                _pp(config)
                and shape.moe is not None
                and (config.moe.balance, config.moe.f_source) == ("global_aux_loss", "exact")
            ),
            "pipeline_parallel_degree",
            "moe.f_source",
        ),
    ),
    Refusal(
        "pipeline with ZeRO 1",
        "torch's ZeroRedundancyOptimizer is kept as an arm for data parallelism alone. Use stage 0, 2 or 3.",
        _together(
            lambda config, shape: _pp(config) and config.parallelism.zero_stage == 1,
            "pipeline_parallel_degree",
            "zero_stage",
        ),
    ),
    Refusal(
        "pipeline with FSDP1",
        "it is a legacy arm for data parallelism alone. Use fsdp_version = 2.",
        _together(
            lambda config, shape: _pp(config) and config.parallelism.fsdp_version == 1,
            "pipeline_parallel_degree",
            "fsdp_version",
        ),
    ),
)
