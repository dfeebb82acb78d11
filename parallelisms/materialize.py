"""From the meta device to weights that no mesh can change.

Each parameter is drawn whole, from a generator seeded by its name, and then cut to this rank's shard: shards differ
between ranks and reassemble to the single-process tensor. (``normal_`` on a DTensor does not; on a CPU mesh it gives
every shard the same numbers.)
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from parallelisms.names import named_parameters

Draw = Callable[[str, torch.Size, torch.device], torch.Tensor]
"""(parameter name, global size, device) -> the whole float32 tensor."""


@torch.no_grad()
def materialize(model: nn.Module, *, draw: Draw, device: torch.device) -> None:
    """Allocate ``model`` on ``device`` and fill it: parameters from ``draw``, buffers by the model's ``init_buffers``.

    ``model.tie_weights`` restores the parameters that are shared, which allocation separates.

    Peak memory beyond the shards is one whole parameter.
    """
    model.to_empty(device=device)
    model.tie_weights()
    for name, parameter in named_parameters(model):
        full = draw(name, parameter.shape, device)
        if isinstance(parameter, DTensor):
            shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        else:
            parameter.copy_(full)
    model.init_buffers()
