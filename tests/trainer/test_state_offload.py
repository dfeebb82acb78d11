"""States that wait in CPU memory give the same updates to the bit, a piece at a time, and the same checkpoints."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from config.schema import Optimizer
from tests import ranks
from trainer.optimizer import build_optimizer
from trainer.state_offload import OffloadedStates

PIECE = 2 * 4 * 300
"""Bytes: of the parameters below (96, 8, 256, 32, 320, 10 elements) some fit together and one fills more than one."""
NAMES = ("exp_avg", "exp_avg_sq")


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 32), nn.Linear(32, 10))


def both(
    name: str, implementation: str = "fused"
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, OffloadedStates]:
    section = Optimizer(name=name, implementation=implementation, weight_decay=0.1, weight_decay_skip=["bias"])
    first, second = network(), network()
    optimizers = [build_optimizer(m.named_parameters(), section) for m in (first, second)]
    return first, optimizers[0], second, OffloadedStates(optimizers[1], piece_bytes=PIECE)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, frozen: bool = False) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(6, 12)).square().sum().backward()
        if frozen and step == 0:
            model[1].weight.grad = None
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_updates_are_the_same_to_the_bit(name, implementation):
    plain, optimizer, other, offloaded = both(name, implementation)
    update(plain, optimizer, 4, frozen=True)  # a parameter without a gradient has no state, then one step less
    update(other, offloaded, 4, frozen=True)
    assert equal(plain, other)
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, offloaded.state[b][key])


def test_a_piece_of_the_states_is_there_at_a_time_and_all_wait_afterwards():
    _, _, model, offloaded = both("AdamW")
    update(model, offloaded, 1)
    waiting = {p: dict(states) for p, states in offloaded.host.items()}
    assert sum(s.nbytes for states in waiting.values() for s in states.values()) == 2 * sum(
        p.nbytes for p in model.parameters()
    )
    sizes, step = [], offloaded.whole.step

    def watched() -> None:
        (group,) = offloaded.whole.param_groups
        sizes.append(2 * sum(p.nbytes for p in group["params"]))
        there = {p for p in waiting if offloaded.state[p]["exp_avg"] is not waiting[p]["exp_avg"]}
        assert there == set(group["params"]), "all others are where they wait"
        step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded.whole, "step", watched)
        update(model, offloaded, 1)
    assert sum(sizes) == 2 * sum(p.nbytes for p in model.parameters())
    assert [s for s in sizes if s > PIECE] == [2 * 4 * 320] and len(sizes) > 2
    assert all(offloaded.state[p][name] is waiting[p][name] for p in waiting for name in NAMES)


def test_a_step_that_fails_leaves_the_groups_as_they_were(monkeypatch):
    _, _, model, offloaded = both("AdamW")
    groups = offloaded.param_groups
    monkeypatch.setattr(offloaded.whole, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        update(model, offloaded, 1)
    assert offloaded.param_groups is groups


def test_checkpoints_go_either_way():
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    plain, optimizer, other, offloaded = both("AdamW")
    update(plain, optimizer, 2)
    update(other, offloaded, 2)
    from_plain = copy.deepcopy(get_optimizer_state_dict(plain, optimizer, options=options))
    from_offloaded = copy.deepcopy(get_optimizer_state_dict(other, offloaded, options=options))
    assert from_plain.keys() == from_offloaded.keys()
    third, continued, fourth, moved = both("AdamW")
    third.load_state_dict(plain.state_dict())
    fourth.load_state_dict(plain.state_dict())
    set_optimizer_state_dict(third, continued, copy.deepcopy(from_offloaded), options=options)
    set_optimizer_state_dict(fourth, moved, copy.deepcopy(from_plain), options=options)
    for model, of in ((plain, optimizer), (third, continued), (fourth, moved)):
        update(model, of, 2)
    assert equal(plain, third) and equal(plain, fourth)
    assert all(moved.state[p][name] is moved.host[p][name] for p in fourth.parameters() for name in NAMES)


def sharded() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    plain, other = network(), network()
    for model in (plain, other):
        for layer in model:
            fully_shard(layer, mesh=mesh)
    section = Optimizer(weight_decay_skip=["bias"])
    optimizer = build_optimizer(plain.named_parameters(), section)
    offloaded = OffloadedStates(build_optimizer(other.named_parameters(), section), piece_bytes=PIECE // 2)
    update(plain, optimizer, 3)
    update(other, offloaded, 3)
    state = get_optimizer_state_dict(other, offloaded)["state"]
    assert all(isinstance(state[name]["exp_avg"], DTensor) for name, _ in other.named_parameters())
    return all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(plain.parameters(), other.parameters(), strict=True)
    )


def test_shards_are_updated_the_same():
    assert ranks.run(2, sharded) == [True, True]
