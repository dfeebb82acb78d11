"""Communication of a step, held against golden figures and against what each technique must send."""

import json

import pytest
import torch
import torch.distributed as dist

from tests import fingerprint, ranks

GOLDEN = json.loads(fingerprint.GOLDEN.read_text())
ARMS = [
    (question, arm, n) for question, arms in fingerprint.QUESTIONS.items() for n, names in arms.items() for arm in names
]


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


@pytest.mark.parametrize("question, arm, world_size", ARMS)
def test_a_step_sends_what_it_used_to(question, arm, world_size):
    if not torch.__version__.startswith(GOLDEN["torch"]):
        pytest.skip(f"golden figures are of torch {GOLDEN['torch']}")
    assert fingerprint.of_arm(question, arm, world_size) == GOLDEN["steps"][f"{question}/{arm} on {world_size}"]
