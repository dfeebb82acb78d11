"""Experts in parts, each while tokens of others travel: the same bits as without, and the order that hides messages."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from parallelisms.dispatch_all_to_all import AllToAll, turns
from parallelisms.names import named_parameters
from parallelisms.token_exchange import ToExperts, ToTokens
from tests import ranks
from tests.parallelisms.test_expert_parallel import FLOAT32, ONE_EXPERT
from tests.parallelisms.test_float8 import float8_experts
from tests.parallelisms.test_parity_expert import (
    BY_OPERATOR,
    EP2,
    EP4,
    FULL,
    NARROW,
    ONE_BY_ONE,
    PARTS,
    PP2,
    SHARED,
    TP2,
)
from tests.parallelisms.test_parity_tensor import sparse
from tests.parallelisms.test_zero import built

BFLOAT16 = {"training__mixed_precision_param": "bfloat16"}
EIGHT = {"moe__num_experts": 8}
NONE = {"moe__comm_overlap": "none"}


# ---- how experts are cut, and what is sent when


@pytest.mark.parametrize(("local", "parts", "sizes"), [(6, 3, (2, 2, 2)), (5, 4, (2, 1, 1, 1)), (3, 1, (3,))])
def test_each_part_has_neighbours_and_none_is_larger_by_two(local, parts, sizes):
    group = mock.Mock(size=lambda: 2)
    exchange = AllToAll(group, 2 * local, overlap=True, parts=parts)
    assert exchange.sizes == sizes and exchange.spans[-1][1] == local
    assert all(end == first for (_, end), (first, _) in zip(exchange.spans, exchange.spans[1:], strict=False))


def test_rows_are_sent_by_part_and_in_it_by_rank():
    # Ranks hold experts 0 to 2 and 3 to 5, in parts of two and of one.
    turn = turns(2, (2, 1), torch.device("cpu")).tolist()
    assert sorted(range(6), key=turn.__getitem__) == [0, 1, 3, 4, 2, 5] and turn[6] == 6
    assert turns(2, (3,), torch.device("cpu")).tolist() == list(range(7))


# ---- the same bits


def figures(config) -> dict[str, torch.Tensor]:
    """Of one step without an update: the loss, what layers with experts gave, and every gradient."""
    _, model, step, batch = built(config)
    found: dict[str, torch.Tensor] = {}

    def note(name: str, output: torch.Tensor) -> None:
        found.setdefault(name, output.detach().clone())

    for name, module in model.named_modules():
        if name.endswith(".moe"):
            module.register_forward_hook(lambda _, __, output, name=name: note(name, output[0]))
    found["loss"] = step.forward_backward(batch).detach().clone()
    found["norm"] = step.clip().detach().clone()
    for name, parameter in named_parameters(model):
        gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        found[f"d {name}"] = gradient.detach().clone()
    return found


def both(plain, in_parts) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return figures(plain), figures(in_parts)


SAME = {
    "bfloat16, shared experts": (2, EP2 | BFLOAT16 | EIGHT | SHARED),
    "loop, full checkpointing": (2, EP2 | FLOAT32 | FULL | EIGHT | {"moe__experts": "loop"}),
}  # fmt: skip
SAME_SLOW = {
    "fsdp2, full checkpointing": (4, EP2 | FLOAT32 | FULL | {"moe__num_experts": 6}),
    "float32": (2, EP2 | FLOAT32 | EIGHT),
    "float32, shared experts": (2, EP2 | FLOAT32 | EIGHT | SHARED),
    "bfloat16": (2, EP2 | BFLOAT16 | EIGHT),
    "bfloat16, loop": (2, EP2 | BFLOAT16 | EIGHT | {"moe__experts": "loop"}),
    "by operator": (2, EP2 | FLOAT32 | EIGHT | BY_OPERATOR | SHARED),
    "capacity": (2, EP2 | FLOAT32 | EIGHT | {"moe__capacity": "position", "moe__capacity_factor": 0.5}),
    "ep4": (4, EP4 | BFLOAT16 | EIGHT),
    "fsdp2, direct": (4, EP2 | BFLOAT16 | EIGHT | {"parallelism__fsdp_collectives": "direct"}),
    "tp2": (2, EP2 | TP2 | BFLOAT16 | EIGHT),
    "fsdp2 x tp2, experts narrowed": (4, EP2 | TP2 | NARROW | FLOAT32 | EIGHT),
    "pp2": (4, PP2 | ONE_BY_ONE | EP2 | FLOAT32 | EIGHT),
    "all tokens to one expert": (2, EP2 | BFLOAT16 | EIGHT | ONE_EXPERT),
}


def check(world_size: int, layout: dict, make=sparse) -> None:
    for plain, in_parts in ranks.run(world_size, both, make(**layout, **NONE), make(**layout, **PARTS)):
        assert plain.keys() == in_parts.keys() and sum(name.endswith(".moe") for name in plain) > 0
        different = [name for name, x in plain.items() if not torch.equal(x, in_parts[name])]
        assert not different, different


@pytest.mark.parametrize("row", SAME)
def test_parts_change_no_bit(row):
    check(*SAME[row])


@pytest.mark.slow
@pytest.mark.parametrize("row", SAME_SLOW)
def test_parts_change_no_bit_elsewhere(row):
    check(*SAME_SLOW[row])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_parts_change_no_bit_in_float8(recipe):
    def make(**keys):
        return float8_experts(sparse(**keys), recipe_name=recipe)

    check(2, EP2 | BFLOAT16 | EIGHT, make)


# ---- the order of events


@contextlib.contextmanager
def watched(seen: list[str]) -> Iterator[None]:
    """Note what leaves and what is waited for."""
    send_all, wait_part, send_part, wait_all = ToExperts.send, ToExperts.wait, ToTokens.send, ToTokens.wait

    def all_leave(way: ToExperts, *tensors: torch.Tensor) -> None:
        send_all(way, *tensors)
        if tensors:
            seen.append(f"{way.label}: {', '.join(map(str, way.under_way))} leave")

    def part_arrives(way: ToExperts, part: int) -> tuple[torch.Tensor, ...]:
        if found := wait_part(way, part):
            seen.append(f"{way.label}: {part} is here")
        return found

    def part_leaves(way: ToTokens, part: int, *tensors: torch.Tensor) -> None:
        send_part(way, part, *tensors)
        seen.append(f"{way.label}: {part} leaves")

    def all_arrive(way: ToTokens) -> tuple[torch.Tensor, ...]:
        found = wait_all(way)
        seen.append(f"{way.label}: all are here")
        return found

    with (
        mock.patch.multiple(ToExperts, send=all_leave, wait=part_arrives),
        mock.patch.multiple(ToTokens, send=part_leaves, wait=all_arrive),
    ):
        yield


def events(config) -> list[str]:
    """Of one micro-batch with one layer of experts, forward and backward."""
    _, model, step, batch = built(config)
    seen: list[str] = []
    (moe,) = (block.moe for block in model.layers.children() if hasattr(block, "moe"))
    compute, shared = moe.experts.compute, moe.shared_experts

    def noted(what: str, out: torch.Tensor) -> torch.Tensor:
        seen.append(what)
        out.register_hook(lambda _: seen.append(f"{what}, backward"))
        return out

    def watched_compute(x, ids, weights, w13, *rest):
        return noted(f"{len(w13)} experts", compute(x, ids, weights, w13, *rest))

    moe.experts.compute = watched_compute
    shared.register_forward_hook(lambda _, __, out: noted("shared experts", out))
    with watched(seen):
        step.forward_backward(batch)
    return seen


ORDER = """
moe.dispatch: 0, 1, 2 leave
shared experts
moe.dispatch: 0 is here
2 experts
moe.combine: 0 leaves
moe.dispatch: 1 is here
1 experts
moe.combine: 1 leaves
moe.dispatch: 2 is here
1 experts
moe.combine: 2 leaves
moe.combine: all are here
moe.combine: 2, 1, 0 leave
moe.combine: 2 is here
1 experts, backward
moe.dispatch: 2 leaves
moe.combine: 1 is here
1 experts, backward
moe.dispatch: 1 leaves
moe.combine: 0 is here
2 experts, backward
moe.dispatch: 0 leaves
moe.dispatch: all are here
"""


def test_while_a_part_computes_the_next_travels_in_and_the_one_before_back():
    keys = SHARED | EIGHT | FLOAT32 | EP2 | PARTS | {"training__global_batch_size": 4}
    for seen in ranks.run(2, events, sparse(**keys)):
        # The shared experts' backward pass may come before or after, not between two parts' messages.
        assert [what for what in seen if what != "shared experts, backward"] == ORDER.strip().splitlines()
        assert seen[seen.index("shared experts, backward") + 1] == "moe.dispatch: all are here"


# ---- fewer experts than parts


def parts_of(config) -> list[tuple[int, ...]]:
    _, model, _, _ = built(config)
    return [block.moe.dispatcher.sizes for block in model.layers.children()]


def test_there_are_no_more_parts_than_experts():
    assert ranks.run(2, parts_of, sparse(**EP2 | PARTS | {"moe__comm_overlap_degree": 8})) == [[(1, 1)] * 2] * 2
