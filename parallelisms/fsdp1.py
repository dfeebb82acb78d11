"""FSDP1, torch's FullyShardedDataParallel: a legacy arm to compare FSDP2 with, for data parallelism alone.

It shards flat concatenations of a block's parameters, where FSDP2 shards each parameter (arXiv 2304.11277).
"""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

logger = logging.getLogger(__name__)


def apply_fsdp1(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: str,
    device: torch.device,
) -> FullyShardedDataParallel:
    """Wrap ``model``: a unit a block, one for all that is outside of blocks. Gradients are summed.

    Args:
        model: materialised and equal on all ranks; until it is wrapped each rank holds a whole copy.
        mesh: one dimension.
        param_dtype, reduce_dtype: as for FSDP2.
        reshard_after_forward: "never" keeps a block's parameters until its backward pass, else they are freed.
        device: where the parameters are; FSDP1 must be told of a CPU.

    Returns:
        The module to call; its parameters keep their names behind wrapper prefixes.
    """
    blocks = set(model.get_submodule("layers").children())
    keep = reshard_after_forward == "never"
    wrapped = FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=CustomPolicy(lambda module: module in blocks),
        # Inputs are in the compute dtype already, except the rotary table, which stays float32.
        mixed_precision=MixedPrecision(
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        ),
        device_id=device,
        use_orig_params=True,
    )
    wrapped.register_comm_hook(mesh.get_group(), _sum)
    logger.info("Applied FSDP1 over %d ranks, parameters %s, reductions %s", mesh.size(), param_dtype, reduce_dtype)
    return wrapped


def _sum(group: dist.ProcessGroup, gradient: torch.Tensor, shard: torch.Tensor) -> None:
    """Sum over ranks, where FSDP1 itself would average."""
    dist.reduce_scatter_tensor(shard, gradient, group=group)
