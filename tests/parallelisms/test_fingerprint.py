"""Communication of a step, held against golden figures and against what each technique must send."""

import copy
import json

import pytest
import torch
import torch.distributed as dist

from tests import fingerprint, ranks

GOLDEN = json.loads(fingerprint.GOLDEN.read_text())
ARMS, BASELINES = fingerprint.arms(), fingerprint.baselines()


def known_traffic() -> dict:
    group, rank = dist.group.WORLD, dist.get_rank()
    x, gathered = torch.zeros(4, 8), torch.zeros(8, 8)
    with fingerprint.Traffic({group.group_name: "all"}) as traffic:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(x, gathered)
        dist.broadcast(x, 0)
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        dist.batch_isend_irecv([dist.P2POp(dist.isend if rank == 0 else dist.irecv, x, 1 - rank)])[0].wait()
    return traffic.summary()


def test_every_kind_is_counted_with_its_bytes():
    first, second = ranks.run(2, known_traffic)
    expected = {"all_reduce": (1, 128), "all_gather": (1, 256), "reduce_scatter": (1, 256), "broadcast": (1, 128)}
    for found, p2p in ((first, "send"), (second, "receive")):
        for kind, (calls, size) in {**expected, p2p: (2, 256)}.items():
            assert found["all"][kind] == {"calls": calls, "bytes": size}, kind


QUICK = [
    "data_parallel",
    "context_parallel_method/ring on 4",
    "context_parallel_method/ulysses on 4",
    "tensor_vs_fsdp/tp on 2",
    "fsdp_vs_tp_vs_pp/pp",
    "pipeline_schedules/1f1b on 2",
    "fsdp_vs_ep/ep on 2",
]


def unless_golden_is_of_another_torch() -> None:
    if not torch.__version__.startswith(GOLDEN["torch"]):
        pytest.skip(f"golden figures are of torch {GOLDEN['torch']}")


def assert_same(found: dict, golden: dict) -> None:
    """To the byte; rows that travel to experts to one per cent, as the rounding of another CPU may flip a choice."""
    found, golden = copy.deepcopy(found), copy.deepcopy(golden)
    for axis, kinds in found.items():
        before = golden.get(axis, {}).get("all_to_all")
        if before and "all_to_all" in kinds:
            assert kinds["all_to_all"].pop("bytes") == pytest.approx(before.pop("bytes"), rel=0.01)
    assert found == golden


@pytest.mark.parametrize(
    "question, arm, world_size",
    [
        pytest.param(q, a, n, marks=[] if f"{q}/{a} on {n}".startswith(tuple(QUICK)) else [pytest.mark.slow])
        for q, a, n in ARMS
    ],
)
def test_a_step_sends_what_it_used_to(question, arm, world_size):
    unless_golden_is_of_another_torch()
    assert_same(fingerprint.of_arm(question, arm, world_size), GOLDEN["steps"][f"{question}/{arm} on {world_size}"])


@pytest.mark.slow
@pytest.mark.parametrize("name", BASELINES)
def test_a_complete_configuration_sends_what_it_used_to(name):
    unless_golden_is_of_another_torch()
    assert_same(fingerprint.of_baseline(name), GOLDEN["steps"][f"{name} on 2"])


def test_every_parallel_configuration_has_a_golden_figure():
    """A new one: ``python -m tests.fingerprint --new``, and look at what it sends."""
    assert {f"{q}/{arm} on {n}" for q, arm, n in ARMS} | {f"{b} on 2" for b in BASELINES} == GOLDEN["steps"].keys()


def test_experts_in_parts_change_the_number_of_messages_of_rows_and_nothing_else():
    plain, in_parts = (GOLDEN["steps"][f"moe_comm_overlap/{arm} on 2"] for arm in ("none", "experts"))
    assert {axis: kinds for axis, kinds in in_parts.items() if axis != "ep"} == {"dp_shard": plain["dp_shard"]}
    # Numbers of rows; rows and weights out, results back; the gradients of these. In four parts all but the first.
    passes, rest = divmod(plain["ep"]["all_to_all"]["calls"], 1 + 6)
    assert rest == 0 and in_parts["ep"]["all_to_all"]["calls"] == passes * (1 + 4 * 6)
