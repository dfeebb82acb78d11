"""Rows that travel between ranks which hold different experts, out and back, forward and backward.

A journey out copies a token to each rank it needs and sends it (gather, all-to-all); the way back returns what came of
it and adds up a token's results (all-to-all, gather and sum). Each is the other's backward. A collective is split in
two autograd functions, one that starts it and one that waits, so that what is computed between the two overlaps with
it in forward and, as autograd runs backwards, in backward too.

Numbers of rows differ between ranks and may be zero. Every rank runs the same operations all the same, so no rank
waits for another for ever and every parameter gets a gradient.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

Rows = tuple[torch.Tensor, ...]
"""Tensors with a row for each row that travels."""


class Order(NamedTuple):
    """Rows as they are sent. R rows are sorted by where they go; T tokens have ``slots`` places each."""

    token: torch.Tensor
    """int64 (R,): the token a row is a copy of."""
    slot: torch.Tensor
    """int64 (R,): its place among the T x slots destinations."""
    row: torch.Tensor
    """int64 (T, slots): the row that goes to a destination; T x slots where none does."""

    def first(self, rows: int) -> "Order":
        """Without the rows after the first ``rows``, which go nowhere."""
        return Order(self.token[:rows], self.slot[:rows], self.row)


class Route(NamedTuple):
    """How many rows go where."""

    sent: list[int]
    """Rows this rank sends to each rank of the group, itself included."""
    received: list[int]
    """Rows it receives from each."""
    group: dist.ProcessGroup


def sort_rows(keys: torch.Tensor, limit: int, bound: int) -> tuple[Order, torch.Tensor]:
    """A row for each key below ``limit``, in their order, stably. Keys of ``limit`` go nowhere.

    Args:
        keys: int64 (T, slots).
        bound: at most so many rows go somewhere.

    Returns:
        Order of ``bound`` rows, those that go nowhere last; int64 (limit,), rows of each key.
    """
    flat = keys.flatten().int()  # a radix sort takes half the passes of int64
    ordered, slot = flat.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(limit, device=flat.device, dtype=flat.dtype), right=True)
    place = torch.empty_like(slot).scatter(0, slot, torch.arange(flat.numel(), device=flat.device))  # the inverse
    row = torch.where(flat < limit, place, flat.numel()).view_as(keys)
    slot = slot[:bound]
    return Order(slot // keys.shape[1], slot, row), torch.diff(ends, prepend=ends.new_zeros(1))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Counts:
    """Numbers that the ranks of a group tell each other, on their way to the host.

    NCCL wants to know on the host how many rows it sends and receives, so the host has to wait for the device once an
    exchange. The numbers are sent and copied beside the stream that computes: what is queued there after this, such as
    the gather of the rows, runs while the host waits, and hides what it takes to queue what comes next.

    Args:
        mine: int64 (n, m): ``m`` numbers for each rank of ``group``.
    """

    def __init__(self, mine: torch.Tensor, group: dist.ProcessGroup):
        n, operators = group.size(), torch.ops._c10d_functional
        self.mine, self.received = mine, operators.all_to_all_single(mine, [1] * n, [1] * n, group.group_name)
        """int64 (n, m) both; ``received`` may be used after :meth:`read`."""
        self._arrived: torch.cuda.Event | None = None
        if not mine.is_cuda:
            self.received = operators.wait_tensor(self.received)
            self._both = torch.stack([mine, self.received])
            return
        side = _side_stream(mine.device)
        side.wait_stream(torch.cuda.current_stream(mine.device))
        with torch.cuda.stream(side):
            both = torch.stack([mine, operators.wait_tensor(self.received)])
            self._both = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
            self._both.copy_(both, non_blocking=True)
            self._arrived = side.record_event()

    def read(self) -> tuple[list[list[int]], list[list[int]]]:
        """What this rank sends each, and what it receives from each: (n, m) both. The host waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        mine, received = self._both.tolist()
        return mine, received


def spread(x: torch.Tensor, order: Order) -> torch.Tensor:
    """(T, D) -> (R, D): the rows that are to be sent (model/row_ops.py)."""
    return torch.ops.ablation_trainer.gather_rows(x, order.token, order.row)


def collect(rows: torch.Tensor, order: Order) -> torch.Tensor:
    """(R, D) -> (T, D): the sum of each token's rows, in at least float32 (model/row_ops.py)."""
    return torch.ops.ablation_trainer.gather_sum(rows, order.token, order.row)


class Journey:
    """One way along a route, with everything that travels in it.

    Args:
        label: the range that a profile shows, in forward and in backward.
        back: from the experts to the tokens.
    """

    def __init__(self, route: Route, label: str, *, back: bool = False):
        self.route, self.label, self.back = route, label, back
        self.gradients: Rows = ()
        """On their way back. Autograd wants a gradient to be as long as its tensor, so they do not pass through it."""

    def start(self, *tensors: torch.Tensor) -> Rows:
        """Send: each (rows sent, ...) -> (rows received, ...). The results may not be read before ``finish``."""
        return _Start.apply(self, *tensors)

    def finish(self, *tensors: torch.Tensor) -> Rows:
        """Wait for what ``start`` gave."""
        return _Finish.apply(self, *tensors)

    def send(self, tensors: Rows, *, reverse: bool = False) -> Rows:
        """Begin, against the direction with ``reverse``."""
        there, here = self.route.sent, self.route.received
        if self.back != reverse:
            there, here = here, there
        with record_function(self.label):
            # The operators themselves: their result is a plain tensor, which autograd may hold before it has arrived.
            group = self.route.group.group_name
            return tuple(
                torch.ops._c10d_functional.all_to_all_single(x.contiguous(), here, there, group) for x in tensors
            )

    def wait(self, tensors: Rows) -> Rows:
        """Until what was sent has arrived."""
        with record_function(self.label):
            return tuple(torch.ops._c10d_functional.wait_tensor(x) for x in tensors)


class _Start(torch.autograd.Function):
    """Forward: send. Backward: wait for the gradients that ``_Finish`` has sent the other way."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, *tensors: torch.Tensor) -> Rows:
        ctx.journey = journey
        return journey.send(tensors)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.journey.gradients = ctx.journey.gradients, ()
        return None, *ctx.journey.wait(gradients)


class _Finish(torch.autograd.Function):
    """Forward: wait. Backward: send the gradients back, before anything that is computed meanwhile."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, *tensors: torch.Tensor) -> Rows:
        ctx.journey = journey
        return tuple(x.view_as(x) for x in journey.wait(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.journey.gradients = ctx.journey.send(grads, reverse=True)
        return None, *grads
