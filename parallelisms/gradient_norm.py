"""One gradient norm over everything that is trained, wherever its parts are."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import titan
from parallelisms.pipeline_split import Stages


def clip_grad_norm(model: nn.Module, max_norm: float, *, pp_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Clip the gradient of ``model`` in place to ``max_norm`` (0: do not) and return its L2 norm before clipping.

    DTensors know how they are spread, and torchtitan's function reduces over all their meshes. FSDP1's parameters are
    plain pieces of which only FSDP1 knows that there are more. Pipeline stages are summed over ``pp_mesh``; a matrix
    that two of them hold counts once.
    """
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm or math.inf)
    if (mesh := _mesh_of_shards_on_cpu(model)) is not None:
        return clip_shards(list(model.parameters()), max_norm or math.inf, mesh)
    copies = model.copies() if isinstance(model, Stages) else []
    counted = [p for p in model.parameters() if all(p is not c for c in copies)]
    # A list of parameters may hold one mesh at a time.
    experts = any(isinstance(p, DTensor) and "ep" in (p.device_mesh.mesh_dim_names or ()) for p in counted)
    norm = titan.clip_grad_norm_(counted, max_norm or math.inf, pp_mesh=pp_mesh, ep_enabled=experts)
    nn.utils.clip_grads_with_norm_(copies, max_norm or math.inf, norm)
    return norm


def clip_shards(parameters: list[nn.Parameter], max_norm: float, mesh: DeviceMesh) -> torch.Tensor:
    """:func:`clip_grad_norm` of FSDP2's shards over the last axis of ``mesh``, wherever they are kept.

    Only one number goes through the device. DTensor would reduce it where the shards are, on the CPU, for which the
    groups of a mesh of GPUs need not have a backend.
    """
    gradients = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
    squared = nn.utils.get_total_norm(gradients).square()
    total = squared.to(mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group(mesh.ndim - 1))
    norm = total.to(squared.device).sqrt()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _mesh_of_shards_on_cpu(model: nn.Module) -> DeviceMesh | None:
    """The mesh of GPUs whose ranks keep their shards in CPU memory; None where they keep them on the device."""
    parameter = next(iter(model.parameters()), None)
    if isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type:
        return parameter.device_mesh
    return None
