"""Pipelines that are refused. Rules of stages and micro-batches, with their numbers, are in config/pipeline.py."""

from config.pipeline import reshard_after_forward
from config.refusal import Refusal, Said, pipelined, together, zero_bubble
from config.schema import Config
from config.shapes import ModelShape


def _cut_groups(config: Config, shape: ModelShape, said: Said) -> str:
    """Quote what experts compute over a whole micro-batch, where a pipeline's is not a local batch."""
    section, moe = config.parallelism, config.moe
    if (
        not pipelined(config)
        or shape.moe is None
        or section.pipeline_parallel_schedule == "naive"
        or section.pipeline_parallel_microbatch_size == config.training.local_batch_size
    ):
        return ""
    over_groups = {
        "moe.balance": moe.balance in ("aux_loss", "global_aux_loss", "sequence_aux_loss"),
        "moe.quantile_preset": moe.balance == "quantile"
        and (
            moe.quantile_preset == "megatron"
            or (moe.quantile_preset, moe.quantile_pool) == ("custom", "microbatch_mean")
        ),
        "moe.extra_sequence_coeff": moe.balance in ("bias_sign", "bias_proportional", "quantile")
        and moe.extra_sequence_coeff > 0,
        "moe.z_loss_coeff": moe.z_loss_coeff > 0,
        "moe.capacity": moe.capacity != "none",
        "moe.routing": moe.routing == "expert_choice",
    }
    found = [said(key) for key, is_over in over_groups.items() if is_over]
    size = said("parallelism.pipeline_parallel_microbatch_size")
    return f"{' and '.join(found)} with {size} and {said('training.local_batch_size')}" if found else ""


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
        "pipeline that cuts a balance group",
        "it is taken over a whole local batch and is not the mean of what its pieces give, so a piece by itself would"
        " train another model. Set pipeline_parallel_microbatch_size to training.local_batch_size.",
        _cut_groups,
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
