"""From the meta device to weights that no mesh can change.

Each parameter is drawn whole, from a generator seeded by its name, and then cut to this rank's shard: shards differ
between ranks and reassemble to the single-process tensor. (``normal_`` on a DTensor does not; on a CPU mesh it gives
every shard the same numbers.)
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from parallelisms.names import named_parameters

Draw = Callable[[str, torch.Size, torch.device], torch.Tensor]
"""(parameter name, global size, device) -> the whole float32 tensor."""


@torch.no_grad()
def materialize(
    model: nn.Module, *, draw: Draw, device: torch.device, parameters_on: torch.device | None = None
) -> None:
    """Allocate ``model`` and fill it: parameters from ``draw``, buffers by the model's ``init_buffers``.

    ``model.tie_weights`` restores the parameters that are shared, which allocation separates.

    Args:
        device: of buffers, and where parameters are drawn: the same numbers wherever they are kept.
        parameters_on: where they are kept; None: there.

    Peak memory beyond the shards is one whole parameter.
    """
    model.to_empty(device=parameters_on or device)
    model.tie_weights()
    if parameters_on not in (None, device):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(
                    name, torch.empty_like(buffer, device=device), name not in module._non_persistent_buffers_set
                )
    for name, parameter in named_parameters(model):
        full = draw(name, parameter.shape, device)
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(_cut(full, parameter))
        else:
            parameter.copy_(full)
    model.init_buffers()


def _cut(full: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """This rank's piece of ``full``, as ``parameter`` is placed.

    Tensor parallelism cuts first and FSDP cuts what it finds, though FSDP's axis comes first in the mesh: a dimension
    that both cut is marked as strided there, and cut last here.
    """
    cuts = [(placement, axis) for axis, placement in enumerate(parameter.placements) if placement != Replicate()]
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is in the mesh
    for placement, axis in sorted(cuts, key=lambda cut: hasattr(cut[0], "split_factor")):
        pieces = full.chunk(parameter.device_mesh.size(axis), placement.dim)
        full = pieces[coordinate[axis]] if coordinate[axis] < len(pieces) else full.narrow(placement.dim, 0, 0)
    return full
