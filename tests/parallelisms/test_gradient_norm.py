"""Clipping FSDP2's shards by way of one number, as under CPU offload, is clipping them as DTensors."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import titan
from parallelisms.gradient_norm import clip_shards
from tests import ranks


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
