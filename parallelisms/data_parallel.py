"""Data parallelism: FSDP2, HSDP and DDP. Gradients are *summed* over ranks, never averaged.

The trainer divides each rank's loss by the global batch's count of valid tokens, so the sum over ranks is the
gradient of the global mean however unequal the ranks' shares are (torchtitan #2206, #2318).
"""

import functools
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from parallelisms.direct_collectives import apply_direct_collectives

logger = logging.getLogger(__name__)


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: str,
    prefetch_blocks: int | None = None,
    operators_compared: bool = False,
    direct: bool = False,
    router_dtype: torch.dtype | None = None,
    expert_mesh: DeviceMesh | None = None,
    cpu_offload: bool = False,
) -> None:
    """Shard ``model`` in place with FSDP2: a unit a block, one for the embedding, one for the final norm and head.

    Args:
        model: modules ``tok_embeddings``, ``layers``, ``norm``, ``output``, of which a pipeline stage lacks some;
            parameters may be on the meta device.
        mesh: one dimension: FSDP over it. Two: HSDP, replicas x shards.
        param_dtype: dtype of the gathered parameters and so of compute; shards stay as they are (float32).
        reduce_dtype: dtype of the gradient reduction.
        reshard_after_forward: "default", "always" or "never". The default frees every unit except the last, which the
            backward pass needs at once.
        prefetch_blocks: blocks gathered ahead of the one that computes, in both directions. None: FSDP2's own order;
            with experts or ``direct``, 1.
        operators_compared: checkpointing compares the operators of a block's recomputation with those of its forward
            pass, which then has to gather the units inside it itself.
        direct: send each parameter from and to its own place (parallelisms/direct_collectives.py).
        router_dtype: dtype of the gathered routers of a mixture of experts. None: there are none.
        expert_mesh: the ranks that hold the same experts under expert parallelism, as ``mesh`` with one dimension or
            two: a layer's experts are then a unit of their own. In one with the rest they would be mixed with those of
            other ranks, and a reduction could come between two exchanges of tokens and wait for ever.
        cpu_offload: keep shards of parameters and gradients in pinned CPU memory, and with them the optimizer's states
            and its update. A shard is copied to the device to be gathered, its gradient back once it is reduced.
    """
    # Activations have the compute dtype already. A cast would catch the rotary table, which is float32 for a reason.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    shard = functools.partial(fully_shard, mesh=mesh, offload_policy=offload)
    reshard = reshard_after_forward != "never"
    embedding, norm, output = (getattr(model, n) for n in ("tok_embeddings", "norm", "output"))
    ends = [module for module in (norm, output) if module is not None]
    if embedding is not None and output is not None and output.weight is embedding.weight:
        # FSDP2 refuses a parameter that two units share: embedding and head become one unit, kept until backward.
        shard([embedding, *ends], mp_policy=policy, reshard_after_forward=False)
    else:
        if embedding is not None:
            shard(embedding, mp_policy=policy, reshard_after_forward=reshard)
            embedding.set_unshard_in_backward(False)  # its gradient needs the tokens alone
            # What FSDP2 would gather ahead of it is the end of the micro-batch before, which is not needed again.
            embedding.set_modules_to_backward_prefetch([embedding])
        if ends:
            shard(ends, mp_policy=policy, reshard_after_forward=reshard_after_forward == "always")
    for block in model.get_submodule("layers").children():
        if router_dtype is not None and hasattr(block, "moe"):
            # A unit of its own, or the router's weights would be gathered in param_dtype.
            router = MixedPrecisionPolicy(
                param_dtype=router_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
            )
            shard(block.moe.router, mp_policy=router, reshard_after_forward=False)  # too small to gather twice
        if expert_mesh is not None and hasattr(block, "moe"):
            _shard_experts(block.moe.experts, expert_mesh, mp_policy=policy, reshard_after_forward=reshard)
        shard(block, mp_policy=policy, reshard_after_forward=reshard)
    shard(model, mp_policy=policy, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            if mesh.device_type == "cpu":  # gloo has no PREMUL_SUM
                module.set_force_sum_reduction_for_comms(True)
    if direct:
        apply_direct_collectives(model)
    if direct or any(hasattr(block, "moe") for block in model.get_submodule("layers").children()):
        prefetch_blocks = prefetch_blocks or 1  # FSDP2's own order is by unit: a router's turn comes late in its block
    if prefetch_blocks is not None:
        _prefetch(model, prefetch_blocks, inside=not operators_compared)
    # Tensor parallelism returns views; what the warning fears, an operation in place on one, the model has nowhere.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    kind = "HSDP" if mesh.ndim == 2 else "FSDP"
    logger.info(
        "Applied %s over %s, parameters %s, reductions %s%s",
        kind,
        tuple(mesh.shape),
        param_dtype,
        reduce_dtype,
        "; shards and states in CPU memory" if cpu_offload else "",
    )


def _shard_experts(experts: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    """Shard whole experts where they share out over the ranks, else every expert's rows."""
    ranks = mesh.size(mesh.ndim - 1)
    by = Shard(0) if all(p.to_local().shape[0] % ranks == 0 for p in experts.parameters()) else Shard(1)
    fully_shard(experts, mesh=mesh, shard_placement_fn=lambda _: by, **options)


def _prefetch(model: nn.Module, depth: int, *, inside: bool) -> None:
    """Gather the units of the next ``depth`` blocks early: those after it in forward, those before it in backward.

    Args:
        inside: in forward the units inside those blocks too.
    """

    def ahead(blocks: list[nn.Module]) -> list[FSDPModule]:
        return _units(blocks) if inside else [block for block in blocks if isinstance(block, FSDPModule)]

    blocks = list(model.get_submodule("layers").children())
    embedding, head = getattr(model, "tok_embeddings", None), getattr(model, "output", None)
    if isinstance(embedding, FSDPModule):
        embedding.set_modules_to_forward_prefetch(ahead(blocks[:depth]))
    for i, block in enumerate(blocks):
        last = [head] if head is not None and i + 1 == len(blocks) else []
        block.set_modules_to_forward_prefetch(ahead(blocks[i + 1 : i + 1 + depth] + last))
        block.set_modules_to_backward_prefetch(_units(blocks[max(0, i - depth) : i][::-1]))


def _units(blocks: list[nn.Module]) -> list[FSDPModule]:
    return [module for block in blocks for module in block.modules() if isinstance(module, FSDPModule)]


def apply_ddp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate ``model`` in place with DDP over the one-dimensional ``mesh``; gradients are summed in 100 MB buckets.

    Parameters must be materialised and equal on all ranks before the first forward pass: nothing is broadcast.
    """
    group = mesh.get_group()
    replicate(model, process_group=group, bucket_cap_mb=100, init_sync=False, gradient_as_bucket_view=True)

    def sum_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, sum_hook)
    logger.info("Applied DDP over %d ranks", mesh.size())
