"""What the micro-batches of a step send and keep, and that sending without packing gives the same bits."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from config.estimate import Estimate, coefficient_table, estimate, keeps_gathered
from config.flavors import resolve_shape
from config.load import load
from parallelisms import direct_collectives
from parallelisms.names import named_parameters
from parallelisms.sum_of_ranks import sum_of_ranks
from tests import ranks
from tests.fingerprint import Traffic, axes_of
from tests.parallelisms.test_parity_data import DIRECT, FSDP2, HSDP, tiny
from tests.parallelisms.test_parity_moe import MODELS, sparse
from tests.parallelisms.test_zero import built

MICRO_BATCHES = 3
UNITS = 4
"""Embedding, two blocks, norm with head."""
KEPT = {"parallelism__fsdp_reshard_after_backward": "never"}
FREED = {"parallelism__fsdp_reshard_after_backward": "always"}
NEVER = KEPT | {"parallelism__fsdp_reshard_after_forward": "never"}
LAST = {"parallelism__fsdp_reduce_gradients": "last"}


def dense(world_size, **changes):
    return tiny(training__global_batch_size=2 * world_size * MICRO_BATCHES, **changes)


def step_of(config):
    """(gradients, calls of each kind along each axis) of the second of two steps, as this rank has them."""
    mesh, model, step, batch = built(config)
    step(batch)
    step.optimizer.zero_grad()
    with Traffic(axes_of(mesh)) as traffic:
        step.forward_backward(batch)
    shards = {n: p.grad.to_local().clone() for n, p in named_parameters(model) if isinstance(p.grad, DTensor)}
    calls = {axis: {kind: seen["calls"] for kind, seen in kinds.items()} for axis, kinds in traffic.summary().items()}
    return shards, calls


CALLS = {
    # The embedding is not gathered for its backward pass, norm and head stay from forward to backward.
    "freed always": (FREED, (1 + 2 * 2 + 1) * MICRO_BATCHES, UNITS * MICRO_BATCHES),
    "freed after forward alone": (KEPT, MICRO_BATCHES + 2 * (MICRO_BATCHES + 1) + 1, UNITS * MICRO_BATCHES),
    "gathered once": (NEVER, UNITS, UNITS * MICRO_BATCHES),
    "reduced once": (FREED | LAST, (1 + 2 * 2 + 1) * MICRO_BATCHES, UNITS),
}


@pytest.mark.parametrize("name", CALLS)
def test_gathers_and_reductions_of_a_step(name):
    changes, gathers, reductions = CALLS[name]
    _, calls = ranks.run(2, step_of, dense(2, **FSDP2 | changes))[0]
    assert calls["dp_shard"] == {"all_gather": gathers, "reduce_scatter": reductions}


def test_copies_are_summed_once_a_step():
    _, calls = ranks.run(4, step_of, dense(4, **HSDP))[0]
    assert calls["dp_replicate"]["all_reduce"] == UNITS
    assert calls["dp_shard"]["reduce_scatter"] > UNITS


BF16 = {"training__mixed_precision_param": "bfloat16", "training__mixed_precision_reduce": "float32"}


@pytest.mark.parametrize("make", [dense, lambda n, **changes: sparse(**MODELS["aux loss, z-loss"], **changes)])
def test_without_packing_the_bits_are_the_same(make):
    """Gradients of bfloat16, summed in float32 over two ranks and micro-batches."""
    both = (ranks.run(2, step_of, make(2, **FSDP2 | BF16 | changes)) for changes in ({}, DIRECT))
    for packed, direct in zip(*both, strict=True):
        assert packed[0].keys() == direct[0].keys()
        for name, gradient in packed[0].items():
            assert gradient.dtype == torch.float32 and torch.equal(gradient, direct[0][name]), name
        assert any(g.count_nonzero() for g in packed[0].values())
        assert "reduce_scatter" in packed[1]["dp_shard"] and "send" not in packed[1]["dp_shard"]
        assert "reduce_scatter" not in direct[1]["dp_shard"] and direct[1]["dp_shard"]["send"] > 0


def test_what_one_rank_holds_whole_needs_no_message():
    """Experts under EP 2 on two ranks: cast into their places, added in float32, with the bits of the packed way."""
    model = MODELS["aux loss, z-loss"] | {"parallelism__expert_parallel_degree": 2}
    both = (ranks.run(2, step_of, sparse(**model | BF16 | changes)) for changes in ({}, DIRECT))
    for packed, direct in zip(*both, strict=True):
        assert packed[0].keys() == direct[0].keys()
        assert all(torch.equal(gradient, direct[0][name]) for name, gradient in packed[0].items())
        assert any("experts" in name and g.count_nonzero() for name, g in direct[0].items())


def test_gradients_of_one_rank_are_added_to_earlier_ones():
    kept, added = torch.ones(4), torch.full((4,), 2.0, dtype=torch.bfloat16)
    params = [
        SimpleNamespace(
            fsdp_placement=SimpleNamespace(dim=0), offload_to_cpu=False, sharded_param=SimpleNamespace(grad=None),
            sharded_size=(2, 2), to_sharded_dtensor=lambda x: distribute(x),
        )
        for _ in range(2)
    ]  # fmt: skip
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def distribute(x):
        return SimpleNamespace(to_local=lambda: x)

    def packed(*arguments):
        raise AssertionError("packed")

    gradients = [added.view(2, 2).clone(), 3 * added.view(2, 2)]
    direct_collectives._reduce(
        packed, params, gradients, group, torch.cpu.Stream(), direct_collectives.DirectReduceScatter(), torch.float32,
        torch.float32, torch.device("cpu"), 1.0, None, None, True, None, None,
    )  # fmt: skip
    assert [p.sharded_param.grad.to_local().unique().tolist() for p in params] == [[2.0], [6.0]]
    target = kept.clone()
    sum_of_ranks(added, added.new_empty(0, 4), 0, target, add=True)
    assert target.tolist() == [3.0] * 4


def test_what_does_not_fit_is_packed():
    """Rows that ranks cannot share equally; a reduction in bfloat16."""
    _, calls = ranks.run(2, step_of, dense(2, **FSDP2 | DIRECT, model__vocab_size=515))[0]
    assert calls["dp_shard"]["reduce_scatter"] == 2 * MICRO_BATCHES  # embedding and head
    narrow = BF16 | {"training__mixed_precision_reduce": "bfloat16"}
    _, calls = ranks.run(2, step_of, dense(2, **FSDP2 | DIRECT | narrow))[0]
    assert calls["dp_shard"]["reduce_scatter"] == UNITS * MICRO_BATCHES and "send" not in calls["dp_shard"]


def test_gradients_of_two_dtypes_are_left_to_fsdp2():
    """It refuses them; messages of one dtype received as another would be wrong numbers."""
    p = SimpleNamespace(
        fsdp_placement=SimpleNamespace(dim=0), offload_to_cpu=False, sharded_param=SimpleNamespace(grad=None)
    )
    gradients = [torch.ones(4, dtype=torch.bfloat16), torch.ones(4)]
    found = direct_collectives._reduce(
        lambda *arguments: "packed", [p, p], gradients, SimpleNamespace(size=lambda: 2), None,
        direct_collectives.DirectReduceScatter(), torch.float32, torch.float32, torch.device("cpu"), 1.0, None, None,
        True, None, None,
    )  # fmt: skip
    assert found == "packed"


def config_of(*words):
    return load(["--job.config_file", "benchmarks/configs/dense_1b.toml", *words]).config


def test_parameters_are_kept_where_activations_are_larger():
    many = ("--training.global_batch_size", "32", "--training.local_batch_size", "4")
    few = ("--training.global_batch_size", "8", "--training.local_batch_size", "1", "--training.seq_len", "128")
    recomputed = ("--activation_checkpoint.mode", "full")
    assert keeps_gathered(config_of(*many), 2)
    assert not keeps_gathered(config_of(*few, *recomputed), 2)
    assert keeps_gathered(config_of(*few, *recomputed, "--parallelism.fsdp_reshard_after_backward", "never"), 2)
    assert not keeps_gathered(config_of(*many, "--parallelism.fsdp_reshard_after_backward", "always"), 2)


def test_parameters_on_the_cpu_do_not_tip_the_scale():
    words = ("--training.global_batch_size", "32", "--training.local_batch_size", "4")
    assert keeps_gathered(config_of(*words, "--training.enable_cpu_offload", "true"), 2)


def test_the_estimate_counts_what_waits():
    words = ("--training.global_batch_size", "32", "--training.local_batch_size", "4")
    free, last, never = (
        estimate(config_of(*words, *more), 2)
        for more in (
            (),
            ("--parallelism.fsdp_reduce_gradients", "last"),
            ("--parallelism.fsdp_reshard_after_backward", "never"),
        )
    )
    assert never.peak == free.peak  # it hides behind activations
    elements = 1_498_482_688
    whole = dict(last.parts())["whole gradients"]
    assert whole == 4 * elements and last.peak == free.peak - free.parts()["gradients"] + whole
    moment = next(m for m in never.moments if m.name == "between two micro-batches")
    assert isinstance(free, Estimate)
    assert moment.size(coefficient_table()["coefficients"]) > 2 * elements


def message_between(config):
    """Bytes of the reduction that FSDP2 still holds when the second micro-batch begins."""
    _, _, step, batch = built(config)
    found, prepare = [], step.passes.set_gradient_sync

    def look(module, last):
        context = vars(module._get_fsdp_state()._comm_ctx)  # empty before the first micro-batch
        states = context.get("reduce_scatter_states") or [context.get("reduce_scatter_state")]  # torch 2.13, 2.11
        kept = [state.reduce_scatter_input for state in states if state is not None]
        tensors = [x for message in kept for x in (message if isinstance(message, list) else [message])]
        found.append(sum(x.numel() * x.element_size() for x in tensors))
        prepare(module, last)

    step.passes.set_gradient_sync = look
    step(batch)
    return found[1]


@pytest.mark.parametrize("changes, width", [({}, 4), (DIRECT, 2), (LAST, 0)], ids=["packed", "direct", "last"])
def test_the_estimate_counts_the_message_that_fsdp2_keeps(changes, width):
    """The embedding's, whole: it lies beside the activations and the loss of the next micro-batch."""
    config = dense(2, **FSDP2 | BF16 | changes)
    shape = resolve_shape(config.model)
    message = width * shape.vocab_size * shape.dim
    loss = next(m for m in estimate(config, 2).moments if m.name == "at the loss")
    assert message in [part.size for part in loss.parts if part.name == "gradients"]
    assert ranks.run(2, message_between, config)[0] == message


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_sums_of_ranks(device, world, add, dtype):
    """Bits of a loop over ranks, for every rank, at a size that fills no block and an offset that aligns nothing."""
    torch.manual_seed(world)
    n, parts = 5003, torch.randn(world, 5003, device=device).to(dtype)
    kept = torch.randn(n, device=device)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    for rank in range(world):
        wide = torch.zeros(world - 1, n + 3, dtype=dtype, device=device)
        received = wide[:, 3:]
        received.copy_(parts[[r for r in range(world) if r != rank]])
        target = kept.clone() if add else torch.full_like(kept, torch.nan)
        sum_of_ranks(parts[rank], received, rank, target, add=add)
        assert torch.equal(target, kept + expected if add else expected), rank
