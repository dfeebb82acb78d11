"""Where each rank stands: the arithmetic, which needs no process group, and the named DeviceMesh made from it.

The degrees come from ``config.world.mesh_degrees``, which checks them against the number of ranks.
"""

from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the mesh, the last one fastest: ranks of a tensor-parallel group are neighbours."""
EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep", "etp")
"""Axes of the same ranks as experts see them: what follows dp_replicate in ``AXES`` is folded anew."""


@dataclass
class Mesh:
    """Ranks arranged along ``AXES``. An axis of one rank costs nothing."""

    rank: int
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Ranks that hold different experts, out of those along dp_shard to tp."""
    etp: int = 1
    """Ranks that share each expert's matrices: 1, or tp. Read where ep > 1."""
    device_mesh: DeviceMesh | None = None
    """pp, dp_replicate, dp_shard, tp. Here dp_shard spans cp as well: parameters are sharded over both alike. None for
    a single process.
    """
    dp_mesh: DeviceMesh | None = None
    """One axis over the ranks that hold the same layers and different tokens: dp_replicate x dp_shard x cp."""
    loss_mesh: DeviceMesh | None = None
    """One axis over every rank whose part of the loss is another one: pp x dp_replicate x dp_shard x cp."""
    cp_mesh: DeviceMesh | None = None
    """The ranks that hold other parts of the same sequences. None where nothing is split."""
    expert_mesh: DeviceMesh | None = None
    """All of ``EXPERT_AXES``. None without expert parallelism."""
    exchange_group: dist.ProcessGroup | None = None
    """The ranks along ep, for tokens on their way."""
    groups: list[dist.ProcessGroup] = field(default_factory=list, init=False)
    """Every group of this rank that is made here: of an axis, of several axes as one, and those apart."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return prod(self.degrees.values())

    @property
    def dp_degree(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """This rank's place among them, 0 .. dp_degree - 1."""
        return self.rank // (self.cp * self.tp) % self.dp_degree

    @property
    def cp_rank(self) -> int:
        """This rank's place among those that share its sequences, 0 .. cp - 1."""
        return self.rank // self.tp % self.cp

    @property
    def pp_rank(self) -> int:
        """This rank's place along the pipeline, 0 .. pp - 1."""
        return self.rank // (self.dp_degree * self.cp * self.tp)

    @property
    def efsdp(self) -> int:
        """Ranks that hold the same experts of one copy of the model, and shard them."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def pp_mesh(self) -> DeviceMesh | None:
        """The ranks that hold other layers, or None without a pipeline."""
        return self.device_mesh["pp"] if self.device_mesh is not None and self.pp > 1 else None

    @property
    def expert_shard_mesh(self) -> DeviceMesh | None:
        """The ranks that hold the same experts, (copies x) shards. None without expert parallelism."""
        if self.expert_mesh is None:
            return None
        return self.expert_mesh["dp_replicate", "efsdp"] if self.replicated else self.expert_mesh["efsdp"]

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 holds the parameters: where data or context ranks share them, as they do under expert
        parallelism, and under tensor parallelism always, as it is FSDP2 that casts parameters, so that ranks exchange
        activations in the compute dtype.
        """
        return self.dp_shard * self.cp > 1 or self.tp > 1

    @property
    def replicated(self) -> bool:
        """Whether whole copies exist, of the model (DDP) or of shard groups (HSDP)."""
        return self.dp_replicate > 1

    def connect(self, device_type: str) -> None:
        """Make the DeviceMesh. Every rank calls it, once the process group is up."""
        sizes = (self.pp, self.dp_replicate, self.dp_shard * self.cp, self.tp)
        self.device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "dp_shard", "tp"))
        self.dp_mesh = self.device_mesh["dp_replicate", "dp_shard"]._flatten("dp")
        self.loss_mesh = self.device_mesh["pp", "dp_replicate", "dp_shard"]._flatten("loss")
        meshes = [self.device_mesh, self.dp_mesh, self.loss_mesh]
        if self.tp > 1:  # DTensor then reduces a gradient norm over both axes at once
            meshes.append(self.device_mesh["dp_shard", "tp"]._flatten("shards"))
        if self.cp > 1:
            group = self._group_of_their_own(self.cp, apart=self.tp)
            self.cp_mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=("cp",))
            meshes.append(self.cp_mesh)
        if self.ep > 1:
            folded = (self.pp, self.dp_replicate, self.efsdp, self.ep, self.etp)
            self.expert_mesh = init_device_mesh(device_type, folded, mesh_dim_names=EXPERT_AXES)
            meshes += [self.expert_mesh, self.expert_mesh[EXPERT_AXES[2:]]._flatten("expert_shards")]
            self.exchange_group = self._group_of_their_own(self.ep, apart=self.etp)
            self.groups.append(self.exchange_group)
        self.groups += [group for mesh in meshes for group in mesh.get_all_groups()]

    def _group_of_their_own(self, size: int, *, apart: int) -> dist.ProcessGroup:
        """This rank's group of ``size`` ranks that are ``apart``. Axes of a DeviceMesh that span the same ranks share a
        group, as cp or ep and dp_shard of two ranks do, and what travels in a layer would wait behind parameters.
        """
        ranks = torch.arange(self.world_size).view(-1, size, apart).transpose(1, 2).reshape(-1, size)
        group, _ = dist.new_subgroups_by_enumeration(ranks.tolist())
        return group

    def sum_over_data(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of ``x``, this rank's part of a loss or a count, over the ranks that hold other parts.

        A pipeline stage without the loss holds zero. ``x`` itself is kept.
        """
        return _summed(x, self.loss_mesh)

    def sum_over_context(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of ``x`` over the ranks that hold other parts of the same sequences. ``x`` is kept."""
        return _summed(x, self.cp_mesh)

    def sum_over_batch(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of ``x``, a count of tokens by the layers held here, over the ranks that hold the same layers
        and read other samples. ``x`` itself is kept.
        """
        return _summed(x, self.dp_mesh)

    def sum_over_stages(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum of ``x`` over the ranks that hold other layers and read the same samples. ``x`` is kept."""
        return _summed(x, self.pp_mesh)

    @property
    def degrees(self) -> dict[str, int]:
        """Axis of ``AXES`` -> ranks along it."""
        return {axis: getattr(self, axis) for axis in AXES}

    def describe(self) -> dict[str, int]:
        """Axis -> ranks along it; those of experts too, where they differ."""
        experts = {axis: getattr(self, axis) for axis in EXPERT_AXES[2:]} if self.ep > 1 else {}
        return self.degrees | experts


def on_this_rank(x: torch.Tensor) -> torch.Tensor:
    """What of a parameter, or of its gradient, is on this rank, as a plain tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def _summed(x: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None:
        return x
    total = x.clone()
    dist.all_reduce(total, group=mesh.get_group())
    return total
