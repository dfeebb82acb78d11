"""One gradient norm over everything that is trained, wherever its parts are."""

import math

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import titan


def clip_grad_norm(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradient of ``model`` in place to ``max_norm`` (0: do not) and return its L2 norm before clipping.

    DTensors know how they are spread, and torchtitan's function reduces over all their meshes. FSDP1's parameters are
    plain pieces of which only FSDP1 knows that there are more.
    """
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm or math.inf)
    return titan.clip_grad_norm_(model.parameters(), max_norm or math.inf)
