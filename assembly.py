"""From a configuration to what train.py runs: a model spread over a mesh, with its weights, and one step of it."""

from __future__ import annotations

import functools

import torch

from config.flavors import resolve_shape
from config.pipeline import stage_count, stage_ranks
from config.precision import precomputes_scales
from config.refusal import compiles
from config.schema import Config
from config.seeds import seeds
from interchange.runs import first_weights
from model.attention import attention_backend
from model.attention_choice import attention_of
from model.decoder import Decoder
from model.expert_step import ExpertStep
from model.experts_float8 import use_float8_experts
from model.initial_weights import draw, initial_value
from model.liger import use_liger
from model.loss_choice import loss_of
from model.row_ops import choose_row_kernels
from parallelisms.accumulation import between_micro_batches
from parallelisms.float8 import precompute_scales
from parallelisms.gradient_norm import clip_grad_norm
from parallelisms.mesh import Mesh
from parallelisms.names import named_parameters
from parallelisms.parallelize import compute_precision, hidden_states, own_part, parallelize
from parallelisms.pipeline import Pipeline
from parallelisms.pipeline_split import Stages
from parallelisms.zero import shard_states
from trainer.optimizer import build_optimizer
from trainer.passes import Passes, Precision, Whole
from trainer.spans import span
from trainer.state_offload import OffloadedStates
from trainer.train_step import Accept, TrainStep


def build_model(config: Config, mesh: Mesh, device: torch.device) -> Decoder:
    """The model of ``config``, spread over ``mesh``, with its initial weights.

    It is described on the meta device first, so no rank ever holds a whole copy that it does not keep.
    """
    shape = resolve_shape(config.model, config.moe)
    if shape.moe is not None:
        choose_row_kernels(config.moe.row_kernels, device.type)
    with torch.device("meta"):
        model = Decoder(
            shape,
            attention_backend(attention_of(config, device.type).name),
            max_positions=config.training.seq_len,
            moe=config.moe,
            noise_seed=seeds(config)["noise_seed"],
            loss=loss_of(config),
        )
        use_liger(model, rms_norm=config.liger.rms_norm, rope=config.liger.rope, swiglu=config.liger.swiglu)
        use_float8_experts(model, config)

    def initial(name: str, size: torch.Size, device: torch.device) -> torch.Tensor:
        return draw(name, size, initial_value(name, shape), seeds(config)["init_seed"], device)

    given = first_weights(config)
    return parallelize(model, mesh, config, draw=given.read if given else initial, device=device)


def build_step(
    config: Config,
    model: Decoder,
    mesh: Mesh,
    device: torch.device,
    accept: Accept = lambda batch, result: True,
) -> TrainStep:
    """One optimizer step of ``config`` for ``model``; ``accept`` may veto its update."""
    optimizer = build_optimizer(
        named_parameters(model),
        config.optimizer,
        seed=seeds(config)["noise_seed"],
        backend=config.compile.backend if compiles(config, "optimizer") else None,
    )
    if config.parallelism.zero_stage == 1 and mesh.device_mesh is not None:
        optimizer = shard_states(optimizer, mesh.device_mesh["dp_replicate"])
    if config.optimizer.state_offload:
        optimizer = OffloadedStates(optimizer)
    precision = functools.partial(compute_precision, mesh, config, device)
    passes: Passes = Whole(model, precision, between_micro_batches(mesh, config))
    if isinstance(model, Stages):
        passes = build_pipeline(config, model, mesh, device, precision)
    return TrainStep(
        model=model,
        passes=passes,
        optimizer=optimizer,
        device=device,
        precision=precision,
        clip_grad_norm=functools.partial(clip_grad_norm, pp_mesh=mesh.pp_mesh),
        max_norm=config.training.max_norm,
        accept=accept,
        experts=build_expert_step(config, model, mesh),
        own_part=functools.partial(own_part, mesh, config),
        after_update=functools.partial(precompute_scales, model) if precomputes_scales(config) else lambda: None,
    )


def build_pipeline(config: Config, model: Stages, mesh: Mesh, device: torch.device, precision: Precision) -> Pipeline:
    """Passes of a model that is spread over the ranks along ``pp``."""
    section, shape = config.parallelism, resolve_shape(config.model, config.moe)
    return Pipeline(
        model,
        mesh,
        ranks=stage_ranks(section, stage_count(section, shape.n_layers)),
        schedule=section.pipeline_parallel_schedule,
        hidden=hidden_states(mesh, config, shape.dim),
        precision=precision,
        device=device,
        span=span,
    )


def build_expert_step(config: Config, model: torch.nn.Module, mesh: Mesh) -> ExpertStep | None:
    """What a step does for the experts of ``model``; None for a dense model."""
    shape = resolve_shape(config.model, config.moe)
    if shape.moe is None:
        return None
    return ExpertStep(
        model,
        config.moe,
        shape,
        total_steps=config.training.steps,
        data_ranks=mesh.dp_degree,
        sum_over_batch=mesh.sum_over_batch,
        sum_over_stages=mesh.sum_over_stages,
        context_ranks=mesh.cp,
        sum_over_context=mesh.sum_over_context,
        expert_ranks=mesh.ep,
    )
