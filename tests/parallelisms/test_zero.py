"""The ladder of ZeRO stages: what each rank holds, predicted and counted, and who keeps which state."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import train
from config.flavors import resolve_shape
from config.memory import MOMENTS, zero_table
from config.world import mesh_degrees
from data.build import build_data
from parallelisms.mesh import Mesh
from parallelisms.names import named_parameters
from parallelisms.zero import shard_states
from tests import ranks
from tests.parallelisms.test_parity_data import tiny
from trainer.adamw import AdamW


def built(config):
    """(mesh, model, step, first batch) of ``config`` on this rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(rank=rank, **mesh_degrees(config, world_size))
    mesh.connect("cpu")
    pipeline = build_data(config, dp_rank=mesh.dp_rank, dp_degree=mesh.dp_degree)
    batch = pipeline.train.next_step()
    pipeline.close()
    model = train.build_model(config, mesh, torch.device("cpu"))
    return mesh, model, train.build_step(config, model, mesh, torch.device("cpu")), batch


def float_bytes() -> int:
    """Bytes of every floating-point storage that a tensor in this process reaches."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        # What a compiled row before left behind holds no memory.
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor | FakeTensor | FunctionalTensor):
            if thing.is_floating_point() and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.size()
    found.pop(0, None)
    return sum(found.values())


def measure(stage: int) -> dict[str, int]:
    config = tiny(parallelism__zero_stage=stage, training__mixed_precision_param="float32")
    before = float_bytes()
    _, model, step, batch = built(config)
    before += sum(b.untyped_storage().size() for b in model.buffers() if b.is_floating_point())
    with torch.no_grad():  # activations are not the subject
        model(batch.micro_batches[0].tokens)
    held = [float_bytes()]
    model.zero_grad()
    step.forward_backward(batch)
    held.append(float_bytes())
    step.clip()
    step.update(batch)
    held.append(float_bytes())
    return {moment: n - before for moment, n in zip(MOMENTS, held, strict=True)}


@pytest.mark.parametrize("stage", range(4))
def test_bytes_a_rank_are_as_predicted(stage):
    config = tiny()
    shape = resolve_shape(config.model, config.moe)
    predicted = zero_table(shape, config.optimizer.name, 2, compute_bytes=4)[stage]
    measured = ranks.run(2, measure, stage)
    for moment in MOMENTS:
        fullest = max(rank[moment] for rank in measured)
        # Adam counts steps: four bytes a parameter.
        assert predicted[moment] <= fullest <= predicted[moment] + 256, (moment, fullest, predicted[moment])


def owners() -> tuple[dict[str, int], list[torch.Tensor]]:
    config = tiny(parallelism__zero_stage=1, training__mixed_precision_param="float32")
    _, model, step, batch = built(config)
    step(batch)
    inner = step.optimizer.optim
    kept = {n: len(inner.state[p]) for n, p in named_parameters(model) if p in inner.state}
    rates = {group["lr"] for group in step.optimizer.param_groups}
    for group in step.optimizer.param_groups:
        group["lr"] = 0.25
    step(batch)
    assert {group["lr"] for group in inner.param_groups} == {0.25} != rates
    return kept, [p.detach().clone() for _, p in named_parameters(model)]


def test_stage_1_keeps_each_state_once_follows_the_schedule_and_agrees_on_weights():
    (first, weights), (second, others) = ranks.run(2, owners)
    assert not first.keys() & second.keys()
    assert len(first) + len(second) == len(weights)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def options_of_part() -> dict:
    """Of this rank's share of an optimizer whose options are not torch's defaults."""
    mesh = init_device_mesh("cpu", (2,))
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    whole = AdamW(parameters, state_dtype=torch.bfloat16, stochastic_rounding=True, seed=5, betas=(0.5, 0.75))
    part = shard_states(whole, mesh)
    parameters[0].grad, parameters[1].grad = torch.ones(4), torch.ones(4)
    part.step()
    (state,) = part.optim.state.values()
    return part.optim.options | {"betas": part.optim.param_groups[0]["betas"], "moments": state["exp_avg"].dtype}


def test_a_part_has_the_options_of_the_whole():
    expected = {
        "state_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 5, "backend": None,
        "betas": (0.5, 0.75), "moments": torch.bfloat16,
    }  # fmt: skip
    assert ranks.run(2, options_of_part) == [expected] * 2
