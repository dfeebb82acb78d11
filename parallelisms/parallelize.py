"""The order of techniques, in one function."""

import contextlib

import torch
from torch import nn

from config.layouts import reshard_after_forward
from config.schema import Config
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.data_parallel import apply_ddp, apply_fsdp
from parallelisms.fsdp1 import apply_fsdp1
from parallelisms.materialize import Draw, materialize
from parallelisms.mesh import Mesh
from parallelisms.tensor_parallel import apply_tensor_parallel

# float64 is for the parity harness: it tells a wrong gradient from a rounded one.
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def parallelize(model: nn.Module, mesh: Mesh, config: Config, *, draw: Draw, device: torch.device) -> nn.Module:
    """Spread ``model`` (on the meta device) over ``mesh`` in place and give it its initial weights.

    Tensor parallelism -> activation checkpointing -> compile (per block) -> FSDP2 / HSDP -> weights -> DDP, FSDP1.

    Tensor parallelism addresses modules by the model's own paths, which wrapping changes, so it comes first; its
    collectives are inside the blocks and are compiled. Checkpointing comes next so that the compiler sees it; FSDP
    wraps what is compiled, so its collectives stay outside the graph; weights need their final placement; DDP and
    FSDP1 read parameters when they are built and come last.

    Returns:
        The module to call: ``model``, except under FSDP1, which wraps it.
    """
    section, fsdp1 = config.parallelism, config.parallelism.fsdp_version == 1
    if mesh.tp > 1 and mesh.device_mesh is not None:
        apply_tensor_parallel(
            model,
            mesh.device_mesh["tp"],
            loss_parallel=not section.disable_loss_parallel,
            asynchronous=section.enable_async_tensor_parallel,
        )
    checkpointing = config.activation_checkpoint
    if checkpointing.mode != "none":
        apply_activation_checkpoint(
            model, mode=checkpointing.mode, selective_ac_option=checkpointing.selective_ac_option
        )
    if config.compile.enable and "model" in config.compile.components:
        apply_compile(model, backend=config.compile.backend)
    if mesh.sharded and not fsdp1 and mesh.device_mesh is not None:
        apply_fsdp(
            model,
            mesh.device_mesh["dp_replicate", "dp_shard"] if mesh.replicated else mesh.device_mesh["dp_shard"],
            param_dtype=DTYPES[config.training.mixed_precision_param],
            reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
            reshard_after_forward=reshard_after_forward(config),
            prefetch_blocks=section.fsdp_prefetch_blocks,
            router_dtype=DTYPES[
                "float64" if config.training.mixed_precision_param == "float64" else config.moe.router_dtype
            ],
        )
    materialize(model, draw=draw, device=device)
    if mesh.replicated and not mesh.sharded and mesh.device_mesh is not None:
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
