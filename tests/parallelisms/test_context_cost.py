"""What context parallelism holds and sends: memory that falls with the ranks, messages that leave before computation.

All-gather attention is right too, so only what it holds tells a ring from it.
"""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from model.attention_blocks import ReferenceBlocks
from parallelisms.allgather_attention import allgather_attention
from parallelisms.block_attention import KERNELS
from parallelisms.context_layout import Layout
from parallelisms.ring_attention import ring_attention
from tests import fingerprint, ranks

B, S, H, KV, D = 1, 64, 4, 4, 16
OPERATORS = {"ring": ring_attention, "allgather": allgather_attention}
KV_BYTES = 2 * B * S * KV * D * 4
"""Keys and values of whole sequences, in float32."""


class Live(TorchDispatchMode):
    """Bytes of the tensors that operators made and that are still alive, their peak, and the order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[int, int]] = {}
        self.peak = self.largest = 0
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if space == "ablation_trainer":
            with self:
                return fingerprint.inside(func)(*args, **(kwargs or {}))
        if space == "c10d":
            self.events.append(name.partition(".")[0])
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                size, count = self.held.get(storage._cdata, (storage.nbytes(), 0))
                self.held[storage._cdata] = size, count + 1
                weakref.finalize(x, self.gone, storage._cdata)
                self.largest = max(self.largest, size)
        self.peak = max(self.peak, sum(size for size, _ in self.held.values()))
        return out

    def gone(self, storage: int) -> None:
        size, count = self.held.pop(storage)
        if count > 1:
            self.held[storage] = size, count - 1


class Unseen(ReferenceBlocks):
    """The reference kernel, whose score matrix does not count: a fused kernel has none."""

    def __init__(self, live: Live):
        super().__init__()
        self.live = live

    def forward(self, *arguments: Any) -> Any:
        self.live.events.append("kernel")
        with _disable_current_modes():
            return super().forward(*arguments)

    def backward(self, *arguments: Any) -> Any:
        self.live.events.append("kernel")
        with _disable_current_modes():
            return super().backward(*arguments)


def cost(method: str, layout: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Of attention forward and backward on this rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    group = init_device_mesh("cpu", (n,)).get_group()
    KERNELS["unseen"] = Unseen(live := Live())
    q, k, v, dout = (torch.randn(B, S // n, h, D, dtype=dtype) for h in (H, KV, KV, H))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    arguments = (*leaves, None, True, layout, "unseen", group.group_name)
    with live:
        out, _ = OPERATORS[method](*arguments)
        torch.autograd.grad(out, leaves, dout)
    events = list(live.events)
    with fingerprint.Traffic({group.group_name: "cp"}) as traffic:
        out, _ = OPERATORS[method](*arguments)
        torch.autograd.grad(out, leaves, dout)
    work = sum(block is not None for block in (Layout(layout, n).block(rank, r, S // n, True) for r in range(n)))
    return {
        "peak": live.peak, "largest": live.largest, "events": events, "work": work, "traffic": traffic.summary()["cp"],
    }  # fmt: skip


@pytest.mark.parametrize("n", [2, 4])
def test_a_ring_holds_a_few_blocks_whatever_the_ranks_and_all_gather_whole_sequences(n):
    for layout in ("zigzag", "contiguous"):
        assert max(r["peak"] for r in ranks.run(n, cost, "ring", layout)) < 7.5 * KV_BYTES / n
        assert min(r["peak"] for r in ranks.run(n, cost, "allgather", layout)) > 4 * KV_BYTES


def test_a_ring_never_makes_a_tensor_of_whole_sequences():
    for n in (2, 4):
        assert max(r["largest"] for r in ranks.run(n, cost, "ring", "zigzag")) <= KV_BYTES / n
        assert min(r["largest"] for r in ranks.run(n, cost, "allgather", "zigzag")) >= KV_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 4])
def test_what_is_sent(n, dtype):
    """Keys and values n - 1 times in each direction, in their dtype; their gradients n times, in float32."""
    block, gradients = KV_BYTES * dtype.itemsize // 4 // n, KV_BYTES // n
    for found in ranks.run(n, cost, "ring", "zigzag", dtype):
        assert found["traffic"]["send"] == {"calls": 3 * n - 2, "bytes": 2 * (n - 1) * block + n * gradients}
        assert found["traffic"]["receive"] == found["traffic"]["send"]
    for found in ranks.run(n, cost, "allgather", "zigzag", dtype):
        assert found["traffic"]["all_gather"] == {"calls": 2, "bytes": 2 * n * block}
        assert found["traffic"]["reduce_scatter"] == {"calls": 1, "bytes": n * gradients}


def test_the_next_keys_are_on_their_way_while_a_rank_computes():
    for found in ranks.run(4, cost, "ring", "contiguous"):
        events, work = found["events"], found["work"]
        assert events.count("kernel") == 2 * work, "blocks that nothing is seen of are not computed"
        first = events.index("kernel")
        assert events[:first].count("send") == events[:first].count("recv_") == 1
    for found in ranks.run(4, cost, "ring", "zigzag"):
        forward = found["events"][:10]
        assert forward == ["send", "recv_", "kernel"] * 3 + ["kernel"]
