"""Tensor parallelism beyond parity: what ranks of a group share, and what the compute dtype does to it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

import train
from parallelisms.materialize import materialize
from parallelisms.names import named_parameters
from tests import ranks
from tests.parallelisms.test_parity_data import tiny
from tests.parallelisms.test_parity_moe import sparse
from tests.parallelisms.test_zero import built

TP2 = {"model__n_kv_heads": 2, "model__qk_norm": True, "parallelism__tensor_parallel_degree": 2}


def replicas_after(config, steps: int) -> dict[str, torch.Tensor]:
    """This rank's copies of parameters that are whole on each rank of a tensor-parallel group."""
    mesh, model, step, batch = built(config)
    for _ in range(steps):
        step(batch)
    tp = mesh.device_mesh.mesh_dim_names.index("tp")
    own = {}
    for name, parameter in named_parameters(model):
        axes = parameter.device_mesh.mesh_dim_names
        assert "tp" in axes, f"{name} knows nothing of its group"
        if parameter.placements[axes.index("tp")] == Replicate():
            own[name] = parameter.to_local().detach().clone()
    assert tp == 3
    return own


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("make, more", [(tiny, {}), (sparse, {"moe__balance": "aux_loss"})], ids=["dense", "experts"])
def test_replicas_are_bit_equal_over_the_group_after_three_steps(make, more, precision):
    config = make(**TP2, **more, training__mixed_precision_param=precision)
    first, second = ranks.run(2, replicas_after, config, 3)
    norms = {n for n in first if "norm" in n}
    assert len(norms) == 2 * 4 + 1 and (make is tiny or any("router" in n for n in first))
    assert first.keys() == second.keys()
    for name, mine in first.items():
        assert torch.equal(mine, second[name]), name


def whole_and_shard(config) -> list[str]:
    """Names of parameters whose shards do not reassemble to what was drawn, or are the same on all ranks."""
    _, model, _, _ = built(config)
    drawn: dict[str, torch.Tensor] = {}

    def draw(name, size, device):
        drawn[name] = torch.randn(size, generator=torch.Generator().manual_seed(len(drawn)))
        return drawn[name]

    materialize(model, draw=draw, device=torch.device("cpu"))
    wrong = []
    for name, parameter in named_parameters(model):
        assert isinstance(parameter, DTensor)
        if not torch.equal(parameter.full_tensor(), drawn[name]):
            wrong.append(name)
        local = parameter.to_local().detach()
        others = [None] * dist.get_world_size()
        dist.all_gather_object(others, local)
        if parameter.ndim > 1 and any(o.equal(local) for i, o in enumerate(others) if i != dist.get_rank()):
            wrong.append(f"{name} on two ranks")
    return wrong


@pytest.mark.parametrize("rows", [512, 510])
def test_shards_over_both_axes_reassemble_to_the_drawn_tensor(rows):
    # 510 rows: 255 a rank of the group, 128 and 127 of them on the two ranks that share them.
    config = tiny(**TP2, model__vocab_size=rows, data__tokenizer_vocab_size=510)
    assert ranks.run(4, whole_and_shard, config) == [[]] * 4


def dtypes_seen(config) -> dict[str, str | bool]:
    _, model, step, batch = built(config)
    seen: dict[str, str | bool] = {}
    block = model.layers["0"]
    block.register_forward_hook(lambda m, inputs, out: seen.update(residual=str(out.dtype), rope=str(inputs[1].dtype)))
    block.register_forward_hook(lambda m, inputs, out: seen.update(given=type(inputs[0]).__name__))
    block.register_forward_hook(lambda m, inputs, out: seen.update(autocast=torch.is_autocast_enabled("cpu")))
    block.attention.wo.register_forward_hook(lambda m, inputs, out: seen.update(sent=str(out.dtype)))
    loss = step.forward(batch.micro_batches[0])
    loss.backward()
    weight = block.attention.wq.weight
    return seen | {"loss": str(loss.dtype), "master": str(weight.dtype), "gradient": str(weight.grad.dtype)}


def test_bfloat16_is_what_ranks_exchange_and_masters_stay_float32():
    (seen, _) = ranks.run(2, dtypes_seen, tiny(**TP2, training__mixed_precision_param="bfloat16"))
    assert seen == {
        "residual": "torch.bfloat16",
        "given": "Tensor",  # an AsyncCollectiveTensor gets no gradient of a compiled block
        "autocast": False,  # FSDP2 has cast what should be
        "sent": "torch.bfloat16",
        "rope": "torch.float32",  # a table in bfloat16 turns position 257 as 256
        "loss": "torch.float32",
        "master": "torch.float32",
        "gradient": "torch.float32",
    }


def losses(config) -> tuple[float, tuple[int, ...], float]:
    mesh, model, step, batch = built(config)
    model.eval()
    with torch.no_grad():
        logits = model(batch.micro_batches[0].tokens)
        loss = sum(step.forward(m) for m in batch.micro_batches)
    return float(loss), tuple(logits.shape), float(mesh.sum_over_data(loss))


def alone(config) -> float:
    from parallelisms.mesh import Mesh

    pipeline = train.build_data(config, dp_rank=0, dp_degree=1)
    batch = pipeline.train.next_step()
    pipeline.close()
    model = train.build_model(config, Mesh(rank=0), torch.device("cpu")).eval()
    step = train.build_step(config, model, Mesh(rank=0), torch.device("cpu"))
    with torch.no_grad():
        return float(sum(step.forward(m) for m in batch.micro_batches))


def test_loss_of_a_group_counts_once_and_logits_stay_split():
    config = tiny(**TP2, training__mixed_precision_param="float32")
    found = ranks.run(2, losses, config)
    config.parallelism.tensor_parallel_degree = 1
    (expected,) = ranks.run(1, alone, config)
    for loss, shape, total in found:
        assert shape == (2, 32, 256)
        assert loss == total == pytest.approx(expected, rel=1e-6)
