"""The vocabulary as ranks share it: what a loss (model/loss.py) is given in place of one that has all columns."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class SharedVocabulary:
    """Rank r of n holds the r-th n-th of the columns; logits are never gathered.

    A loss sends three numbers a token forward, the largest logit, the sum of exponentials and the target's logit, and
    none backward.

    Args:
        mesh: the n ranks, one dimension.
    """

    def __init__(self, mesh: DeviceMesh):
        self.parts = mesh.size()
        self.group = mesh.get_group()
        self.rank = self.group.rank()

    def first(self, columns: int) -> int:
        """Id of the first of this rank's ``columns``."""
        return self.rank * columns

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the ranks, in place."""
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise sum over the ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's columns, as they are."""
        return logits


class GatheredVocabulary:
    """Every rank gathers the logits and computes the loss of them all.

    Args:
        mesh: the ranks that hold the columns, one dimension.
    """

    parts = 1

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    def first(self, columns: int) -> int:
        """0: all columns are here."""
        return 0

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Nobody has others."""
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Nobody has others."""
        return x

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """(..., columns of this rank) -> (..., all columns)."""
        split = DTensor.from_local(logits, self.mesh, [Shard(logits.ndim - 1)], run_check=False)
        return split.redistribute(placements=[Replicate()]).to_local()
