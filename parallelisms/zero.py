"""ZeRO stage 1: whole copies of weights and gradients, each optimizer state on one rank only.

(Rajbhandari et al., arXiv 1910.02054, P_os.) Stages 2 and 3 are FSDP2, parallelisms/data_parallel.py.
"""

import inspect
import logging

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer

logger = logging.getLogger(__name__)


def shard_states(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> ZeroRedundancyOptimizer:
    """``optimizer`` with its states spread over the one-dimensional ``mesh``.

    Whole parameters are handed out, the largest first, each to the rank that has least; ``step`` updates a rank's own
    and then broadcasts them. ``optimizer`` must not have taken a step; its groups and options are kept.
    """
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    sharded = ZeroRedundancyOptimizer(
        optimizer.param_groups,
        optimizer_class=type(optimizer),
        process_group=mesh.get_group(),
        parameters_as_bucket_view=True,  # one broadcast a rank instead of one a parameter
        **options,
    )
    logger.info("Applied ZeRO stage 1: optimizer states over %d ranks", mesh.size())
    return sharded
