"""Every group of a job is bounded, whatever made it: a collective that hangs anywhere is to be reported."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from parallelisms import process_group
from parallelisms.mesh import Mesh
from tests import ranks

LAYOUTS = {
    "pp2 x fsdp2": {"pp": 2, "dp_shard": 2},
    "hsdp 2x2": {"dp_replicate": 2, "dp_shard": 2},
    "cp2 x tp2": {"cp": 2, "tp": 2},
    "fsdp2 x tp2 x ep2": {"dp_shard": 2, "tp": 2, "ep": 2},
}


def timeouts(degrees: dict[str, int]) -> dict[str, timedelta]:
    """Name of each group of this rank -> its timeout after ``set_timeout``."""
    mesh = Mesh(rank=dist.get_rank(), **degrees)
    mesh.connect("cpu")
    process_group.barrier()  # a rank that is done leaves, and may be gone before others have connected
    process_group.set_timeout(mesh, 7)
    groups = dist.distributed_c10d._world.pg_map
    return {g.group_name: g._get_backend(torch.device("cpu")).options._timeout for g in groups}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_group_is_bounded(layout):
    for found in ranks.run(4, timeouts, LAYOUTS[layout]):
        assert len(found) > 2 and set(found.values()) == {timedelta(seconds=7)}, found
