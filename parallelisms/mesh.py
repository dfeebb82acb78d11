"""Where each rank stands: the arithmetic, which needs no process group, and the named DeviceMesh made from it.

The degrees come from ``config.world.mesh_degrees``, which checks them against the number of ranks.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass
class Mesh:
    """Ranks arranged as dp_replicate x dp_shard, the last axis fastest."""

    dp_replicate: int
    dp_shard: int
    rank: int
    device_mesh: DeviceMesh | None = None
    """Axes "dp_replicate" and "dp_shard". None for a single process."""
    dp_mesh: DeviceMesh | None = None
    """One axis over every rank that reads different samples, for reductions."""

    @property
    def dp_degree(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """This rank's place among them, 0 .. dp_degree - 1."""
        return self.rank

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the parameters."""
        return self.dp_shard > 1

    @property
    def replicated(self) -> bool:
        """Whether whole copies exist, of the model (DDP) or of shard groups (HSDP)."""
        return self.dp_replicate > 1

    def connect(self, device_type: str) -> None:
        """Make the DeviceMesh. Every rank calls it, once the process group is up."""
        axes = ("dp_replicate", "dp_shard")
        self.device_mesh = init_device_mesh(device_type, (self.dp_replicate, self.dp_shard), mesh_dim_names=axes)
        self.dp_mesh = self.device_mesh[axes]._flatten("dp")

    def sum_over_data(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of ``x`` over the ranks that hold different tokens; ``x`` itself is kept."""
        if self.dp_mesh is None:
            return x
        total = x.clone()
        dist.all_reduce(total, group=self.dp_mesh.get_group())
        return total

    def describe(self) -> dict[str, int]:
        """Axis sizes, for the run record."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
