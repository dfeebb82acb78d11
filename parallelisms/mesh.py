"""Where each rank stands: the arithmetic, which needs no process group, and the named DeviceMesh made from it.

The degrees come from ``config.world.mesh_degrees``, which checks them against the number of ranks.
"""

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""Axes of the mesh, the last one fastest: ranks of a tensor-parallel group are neighbours."""


@dataclass
class Mesh:
    """Ranks arranged along ``AXES``. An axis of one rank costs nothing."""

    rank: int
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    device_mesh: DeviceMesh | None = None
    """All of ``AXES``. None for a single process."""
    dp_mesh: DeviceMesh | None = None
    """One axis over the ranks that read different samples, dp_replicate x dp_shard."""
    loss_mesh: DeviceMesh | None = None
    """One axis over every rank whose part of the loss is another one: pp x dp_replicate x dp_shard."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return prod(self.describe().values())

    @property
    def dp_degree(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """This rank's place among them, 0 .. dp_degree - 1."""
        return self.rank // self.tp % self.dp_degree

    @property
    def pp_rank(self) -> int:
        """This rank's place along the pipeline, 0 .. pp - 1."""
        return self.rank // (self.dp_degree * self.tp)

    @property
    def pp_mesh(self) -> DeviceMesh | None:
        """The ranks that hold other layers, or None without a pipeline."""
        return self.device_mesh["pp"] if self.device_mesh is not None and self.pp > 1 else None

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the parameters: where data ranks share them, and under tensor parallelism always, as it
        is FSDP2 that casts parameters, so that ranks exchange activations in the compute dtype.
        """
        return self.dp_shard > 1 or self.tp > 1

    @property
    def replicated(self) -> bool:
        """Whether whole copies exist, of the model (DDP) or of shard groups (HSDP)."""
        return self.dp_replicate > 1

    def connect(self, device_type: str) -> None:
        """Make the DeviceMesh. Every rank calls it, once the process group is up."""
        self.device_mesh = init_device_mesh(device_type, tuple(self.describe().values()), mesh_dim_names=AXES)
        self.dp_mesh = self.device_mesh["dp_replicate", "dp_shard"]._flatten("dp")
        self.loss_mesh = self.device_mesh["pp", "dp_replicate", "dp_shard"]._flatten("loss")
        if self.tp > 1:  # DTensor then reduces a gradient norm over both axes at once
            self.device_mesh["dp_shard", "tp"]._flatten("shards")

    def sum_over_data(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of ``x``, this rank's part of a loss or a count, over the ranks that hold other parts.

        A pipeline stage without the loss holds zero. ``x`` itself is kept.
        """
        return _summed(x, self.loss_mesh)

    def sum_over_batch(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of ``x``, a count of tokens by the layers held here, over the ranks that hold the same layers
        and read other samples. ``x`` itself is kept.
        """
        return _summed(x, self.dp_mesh)

    def sum_over_stages(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of ``x`` over the ranks that hold other layers and read the same samples. ``x`` is kept."""
        return _summed(x, self.pp_mesh)

    def describe(self) -> dict[str, int]:
        """Axis -> ranks along it."""
        return {axis: getattr(self, axis) for axis in AXES}


def _summed(x: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None:
        return x
    total = x.clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total
