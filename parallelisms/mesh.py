"""Where each rank stands: the arithmetic, which needs no process group, and the named DeviceMesh made from it."""

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from config.errors import ConfigError
from config.schema import Parallelism


@dataclass
class Mesh:
    """Ranks arranged as dp_replicate x dp_shard, the last axis fastest."""

    dp_replicate: int
    dp_shard: int
    rank: int
    device_mesh: DeviceMesh | None = None
    """Axes "dp_replicate" and "dp_shard", and both flattened as "dp". None for a single process."""

    @property
    def dp_degree(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """This rank's place among them, 0 .. dp_degree - 1."""
        return self.rank

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the parameters."""
        return self.dp_shard > 1

    @property
    def replicated(self) -> bool:
        """Whether whole copies exist, of the model (DDP) or of shard groups (HSDP)."""
        return self.dp_replicate > 1

    @property
    def dp_mesh(self) -> DeviceMesh | None:
        """One axis over every rank that reads different samples, for reductions; None for a single process."""
        return None if self.device_mesh is None else self.device_mesh["dp"]

    def connect(self, device_type: str) -> None:
        """Make the DeviceMesh. Every rank calls it, once the process group is up."""
        axes = ("dp_replicate", "dp_shard")
        self.device_mesh = init_device_mesh(device_type, (self.dp_replicate, self.dp_shard), mesh_dim_names=axes)
        self.device_mesh[axes]._flatten("dp")

    def describe(self) -> dict[str, int]:
        """Axis sizes, for the run record."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}


def plan_mesh(parallelism: Parallelism, world_size: int, rank: int) -> Mesh:
    """Arrange ``world_size`` ranks as the ``[parallelism]`` section says. Touches no device.

    Raises:
        ConfigError: the degrees do not multiply to the world size.
    """
    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    if shard == -1:
        shard = max(1, world_size // replicate)
    if replicate * shard != world_size:
        raise ConfigError(
            f"parallelism: data_parallel_replicate_degree({replicate}) x data_parallel_shard_degree({shard}) = "
            f"{replicate * shard} but WORLD_SIZE is {world_size}. Set data_parallel_shard_degree = -1 to derive it."
        )
    return Mesh(replicate, shard, rank)


