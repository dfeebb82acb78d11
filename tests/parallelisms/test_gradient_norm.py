"""Clipping by one norm over all meshes, and of FSDP2's shards by way of one number, as under CPU offload."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import titan
from parallelisms.gradient_norm import clip_shards
from tests import parity, ranks
from tests.parallelisms.test_parity_context import CP2
from tests.parallelisms.test_parity_data import tiny
from tests.parallelisms.test_parity_expert import AUX, EP2, PP2
from tests.parallelisms.test_parity_tensor import sparse
from tests.parallelisms.test_pipeline_parity import DDP2, TIED, TP2, pp

ROWS = {
    "pp2, tied": (2, tiny, TIED, pp("1F1B")),
    "fsdp2 x pp2 V, tied": (4, tiny, TIED | {"model__n_layers": 4}, pp("ZBVZeroBubble")),
    "pp2 x ep2": (4, sparse, AUX, PP2 | EP2),
}
SLOW = {
    "ddp2": (2, tiny, {}, DDP2),
    "zero 1": (2, tiny, TIED, {"parallelism__zero_stage": 1}),
    "fsdp1": (2, tiny, TIED, {"parallelism__fsdp_version": 1}),
    "fsdp2 x tp2": (4, tiny, TIED | {"model__n_kv_heads": 2}, TP2),
    "hsdp x cp2": (4, tiny, {}, CP2 | DDP2),
    "pp2 x tp2": (4, tiny, TIED | {"model__n_kv_heads": 2}, pp("1F1B") | TP2),
    "tp2 x ep2": (2, sparse, AUX, TP2 | EP2),
}


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(r, marks=pytest.mark.slow) for r in SLOW)])
def test_clipped_ranks_train_as_a_clipped_process_does(row):
    """Weights after two updates, with gradients of about a hundred times the norm that they are clipped to."""
    world_size, make, model, layout = (ROWS | SLOW)[row]
    report = parity.check(make(**model), make(**model | layout), world_size=world_size, max_norm=0.01)
    assert report.errors["weights"] < 1e-6


def both_norms(shape: tuple[int, ...], max_norm: float) -> tuple[float, float, float]:
    """The norm by either way, and the largest difference of the clipped gradients."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))  # rows that do not share out
    other = copy.deepcopy(model)
    for each in (model, other):
        fully_shard(each, mesh=mesh)
        each(torch.ones(2, 6)).square().sum().backward()
    expected = titan.clip_grad_norm_(model.parameters(), max_norm)
    found = clip_shards(list(other.parameters()), max_norm, mesh)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return float(expected), float(found), max(float((a.grad - b.grad).full_tensor().abs().max()) for a, b in pairs)


def test_one_number_is_enough_to_clip_shards():
    for expected, found, difference in ranks.run(2, both_norms, (2,), 0.1):
        assert abs(found - expected) < 1e-5 * expected and difference < 1e-7


def test_copies_of_shards_count_once():
    for expected, found, difference in ranks.run(2, both_norms, (2, 1), 0.1):
        assert abs(found - expected) < 1e-5 * expected and difference < 1e-7
