"""The order of techniques, in one function."""

import contextlib

import torch
from torch import nn

from config.context import context_layout
from config.pipeline import reshard_after_forward, stage_modules, stage_ranks
from config.precision import float8_linears
from config.refusal import compares_operators, compiles, zero_bubble
from config.schema import Config
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.activation_offload import apply_activation_offload
from parallelisms.compile import apply_compile, apply_compile_loss
from parallelisms.context_layout import Inputs, Layout
from parallelisms.context_parallel import apply_context_parallel
from parallelisms.data_parallel import apply_ddp, apply_fsdp
from parallelisms.expert_parallel import apply_expert_parallel
from parallelisms.float8 import apply_float8
from parallelisms.fsdp1 import apply_fsdp1
from parallelisms.materialize import Draw, materialize
from parallelisms.mesh import Mesh
from parallelisms.pipeline_split import parts_of, split
from parallelisms.tensor_parallel import apply_tensor_parallel

# float64 is for the parity harness: it tells a wrong gradient from a rounded one.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def parallelize(model: nn.Module, mesh: Mesh, config: Config, *, draw: Draw, device: torch.device) -> nn.Module:
    """Spread ``model`` (on the meta device) over ``mesh`` in place and give it its initial weights.

    Float8 -> pipeline split -> each stage: tensor parallelism, expert parallelism, context parallelism -> activation
    checkpointing -> compile (per block) -> FSDP2 / HSDP -> weights -> DDP, FSDP1.

    Float8 puts other modules in the place of linear layers: before anything wraps one. What a rank does not hold need
    not be wrapped, so the split comes next. Tensor, expert and context parallelism address modules by the model's own
    paths, which wrapping changes; their messages are inside the blocks.
    Checkpointing comes next so that the compiler sees it; FSDP wraps what is compiled, so its collectives stay outside;
    weights need their final placement; DDP and FSDP1 read parameters when they are built and come last. A pipeline
    sums gradients over whole copies itself (parallelisms/pipeline.py).

    Returns:
        The module to train: ``model``, this rank's stages of it, or what FSDP1 wrapped it in.
    """
    section, fsdp1 = config.parallelism, config.parallelism.fsdp_version == 1
    if float8_linears(config):
        float8 = config.quantize.linear.float8
        apply_float8(
            model,
            recipe=float8.recipe_name,
            filter_fqns=float8.filter_fqns,
            all_gather=float8.enable_fsdp_float8_all_gather and mesh.sharded,
            emulate=float8.emulate,
        )
    if mesh.pp > 1:
        modules = stage_modules(section, len(model.get_submodule("layers")))
        owners = stage_ranks(section, len(modules))
        model = split(model, modules, [i for i, rank in enumerate(owners) if rank == mesh.pp_rank])
    for part in parts_of(model):
        if mesh.tp > 1 and mesh.device_mesh is not None:
            apply_tensor_parallel(
                part,
                mesh.device_mesh["tp"],
                loss_parallel=not section.disable_loss_parallel,
                asynchronous=section.enable_async_tensor_parallel,
                experts=mesh.expert_mesh is None,
            )
        if mesh.expert_mesh is not None and mesh.exchange_group is not None:
            apply_expert_parallel(
                part,
                mesh.expert_mesh["ep", "etp"],
                group=mesh.exchange_group,
                dispatcher=config.moe.dispatcher,
                comm_overlap=config.moe.comm_overlap,
                comm_overlap_degree=config.moe.comm_overlap_degree,
                tensor_mesh=mesh.device_mesh["tp"] if mesh.tp > 1 and mesh.device_mesh is not None else None,
            )
        if mesh.cp_mesh is not None:
            layout = Layout(context_layout(section), mesh.cp)
            apply_context_parallel(part, mesh.cp_mesh, method=section.context_parallel_method, layout=layout)
        checkpointing = config.activation_checkpoint
        if checkpointing.mode not in ("none", "memory_budget"):
            apply_activation_checkpoint(
                part, mode=checkpointing.mode, selective_ac_option=checkpointing.selective_ac_option
            )
        if checkpointing.offload:
            apply_activation_offload(part)
        if compiles(config, "model"):
            apply_compile(
                part,
                backend=config.compile.backend,
                inside_wrapper=mesh.tp > 1 or checkpointing.offload,
                memory_budget=checkpointing.memory_budget if checkpointing.mode == "memory_budget" else 1.0,
            )
        if compiles(config, "loss"):
            apply_compile_loss(part, backend=config.compile.backend, backward_twice=zero_bubble(config))
        if mesh.sharded and not fsdp1 and mesh.device_mesh is not None:
            apply_fsdp(
                part,
                mesh.device_mesh["dp_replicate", "dp_shard"] if mesh.replicated else mesh.device_mesh["dp_shard"],
                param_dtype=DTYPES[config.training.mixed_precision_param],
                reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
                reshard_after_forward=reshard_after_forward(config),
                prefetch_blocks=section.fsdp_prefetch_blocks,
                operators_compared=compares_operators(config),
                direct=section.fsdp_collectives == "direct",
                router_dtype=DTYPES[
                    "float64" if config.training.mixed_precision_param == "float64" else config.moe.router_dtype
                ],
                expert_mesh=mesh.expert_shard_mesh,
                cpu_offload=config.training.enable_cpu_offload,
            )
        kept_on = torch.device("cpu") if config.training.enable_cpu_offload else device
        materialize(part, draw=draw, device=device, parameters_on=kept_on)
    if mesh.replicated and not mesh.sharded and mesh.pp == 1 and mesh.device_mesh is not None:
        apply_ddp(model, mesh.device_mesh["dp_replicate"])
    if mesh.sharded and fsdp1 and mesh.device_mesh is not None:
        return apply_fsdp1(
            model,
            mesh.device_mesh["dp_shard"],
            param_dtype=DTYPES[config.training.mixed_precision_param],
            reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
            reshard_after_forward=section.fsdp_reshard_after_forward,
            device=device,
        )
    return model


def compute_precision(mesh: Mesh, config: Config, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """The context a forward pass runs in: FSDP2 casts parameters itself, every other layout computes under autocast."""
    dtype = DTYPES[config.training.mixed_precision_param]
    if mesh.sharded or dtype != torch.bfloat16:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def own_part(mesh: Mesh, config: Config, inputs: Inputs) -> Inputs:
    """What this rank computes of a micro-batch: all of it, or its part of each sequence."""
    if mesh.cp == 1:
        return inputs
    return Layout(context_layout(config.parallelism), mesh.cp).part(inputs, mesh.cp_rank)


def hidden_states(mesh: Mesh, config: Config, dim: int) -> torch.Tensor:
    """What pipeline stages exchange of a micro-batch, on the meta device: its shape on one rank, and its dtype."""
    section, training = config.parallelism, config.training
    naive = section.pipeline_parallel_schedule == "naive"
    rows = training.local_batch_size if naive else section.pipeline_parallel_microbatch_size
    dtype = DTYPES[training.mixed_precision_param]
    return torch.empty(
        rows, training.seq_len // (mesh.cp * mesh.tp), dim, dtype=dtype, device="meta", requires_grad=True
    )
