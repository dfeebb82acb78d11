"""Pipelines that are refused. Rules of stages and micro-batches, with their numbers, are in config/pipeline.py."""

from config.pipeline import reshard_after_forward
from config.refusal import Refusal, pipelined, together, zero_bubble

PIPELINE = (
    Refusal(
        "zero bubble with activation checkpointing",
        "gradients of inputs and of weights are computed in two passes, and both would recompute what was not kept"
        ' (torchtitan #773). Set the mode to "none", or use "1F1B" or "Interleaved1F1B".',
        together(
            lambda config, shape: zero_bubble(config) and config.activation_checkpoint.mode != "none",
            "pipeline_parallel_schedule",
            "activation_checkpoint.mode",
        ),
    ),
    Refusal(
        "zero bubble with compiled blocks",
        "the schedule takes the autograd graph apart between a layer's inputs and its weights, and a compiled block is"
        ' one node of it (torchtitan #3584). Set compile.components = ["loss"], or use "1F1B" or "Interleaved1F1B".',
        together(
            lambda config, shape: (
                zero_bubble(config) and config.compile.enable and "model" in config.compile.components
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
        together(
            lambda config, shape: zero_bubble(config) and reshard_after_forward(config) != "never",
            "pipeline_parallel_schedule",
            "fsdp_reshard_after_forward",
            "zero_stage",
        ),
    ),
    Refusal(
        "pipeline with experts",
        "loads and balance losses are summed and reported over all ranks, of which each would hold other layers. Set"
        " pipeline_parallel_degree = 1.",
        together(
            lambda config, shape: pipelined(config) and shape.moe is not None,
            "pipeline_parallel_degree",
            "model.flavor",
        ),
    ),
    Refusal(
        "pipeline with exact global load",
        "the load comes from a forward pass of the whole model before the step, and no schedule has one. Set"
        ' moe.f_source = "running" or "previous_step".',
        together(
            lambda config, shape: (
                pipelined(config)
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
        together(
            lambda config, shape: pipelined(config) and config.parallelism.zero_stage == 1,
            "pipeline_parallel_degree",
            "zero_stage",
        ),
    ),
    Refusal(
        "pipeline with FSDP1",
        "it is a legacy arm for data parallelism alone. Use fsdp_version = 2.",
        together(
            lambda config, shape: pipelined(config) and config.parallelism.fsdp_version == 1,
            "pipeline_parallel_degree",
            "fsdp_version",
        ),
    ),
)
