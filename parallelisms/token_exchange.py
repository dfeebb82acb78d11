"""Rows that travel between ranks which hold different experts, out and back, forward and backward.

A journey out copies a token to each rank it needs and sends it (gather, all-to-all); the way back returns what came of
it and adds up a token's results (all-to-all, gather and sum). Each is the other's backward. A collective is split in
two autograd functions, one that starts it and one that waits, so that what is computed between the two overlaps with
it in forward and, as autograd runs backwards, in backward too. Between them autograd sees a handle, a tensor without
elements: what is under way is held beside the graph.

A journey has one part or more. On the side of the tokens the rows of all parts are one tensor, which is never cut or
put together by a copy: a part is a slice of it, sent from there and received there. On the side of the experts each
part is a tensor of its own.

Numbers of rows differ between ranks and may be zero. Every rank runs the same operations all the same, so no rank
waits for another for ever and every parameter gets a gradient.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
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
    """How many rows of one part go where."""

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


class ToExperts:
    """Tensors of all rows, which set out at once and arrive a part at a time.

    Args:
        routes: of the parts, in the order of their rows.
        label: the range that a profile shows.
        last_first: begin with the last part.
    """

    def __init__(self, routes: Sequence[Route], label: str, *, last_first: bool = False):
        self.routes, self.label, self.last_first = routes, label, last_first
        self.under_way: dict[int, tuple[Rows, Rows]] = {}

    def send(self, *tensors: torch.Tensor) -> None:
        """Begin: each (rows of all parts, ...)."""
        sizes, parts = [sum(route.sent) for route in self.routes], list(enumerate(self.routes))
        with record_function(self.label):
            cut = [x.contiguous().split(sizes) for x in tensors]
            for part, route in reversed(parts) if self.last_first else parts:
                leaving = tuple(pieces[part] for pieces in cut)
                arriving = tuple(_sent(x, route.received, route.sent, route.group) for x in leaving)
                self.under_way[part] = arriving, leaving

    def wait(self, part: int) -> Rows:
        """Until ``part`` has arrived: each (rows received, ...)."""
        arriving, _ = self.under_way.pop(part)
        with record_function(self.label):
            return _arrived(arriving)


class ToTokens:
    """Tensors of one part each, which set out one after the other and arrive together, in one tensor.

    Args:
        routes, label: as of :class:`ToExperts`.
    """

    def __init__(self, routes: Sequence[Route], label: str):
        self.routes, self.label = routes, label
        self.ends = list(itertools.accumulate(sum(route.sent) for route in routes))
        self.arriving: Rows = ()
        self.under_way: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, part: int, *tensors: torch.Tensor) -> None:
        """Begin ``part``: each (rows received, ...), to where they came from."""
        route, end = self.routes[part], self.ends[part]
        with record_function(self.label):
            if len(self.routes) == 1:  # nothing to put together
                self.arriving = tuple(_sent(x, route.sent, route.received, route.group) for x in tensors)
                return
            if not self.arriving:
                self.arriving = tuple(x.new_empty(self.ends[-1], *x.shape[1:]) for x in tensors)
            for x, whole in zip(tensors, self.arriving, strict=True):
                x, place = x.contiguous(), whole[end - sum(route.sent) : end]
                work = dist.all_to_all_single(place, x, route.sent, route.received, group=route.group, async_op=True)
                self.under_way.append((work, x))

    def wait(self) -> Rows:
        """Until all parts have arrived: each (rows of all parts, ...)."""
        arriving, self.arriving = self.arriving, ()
        under_way, self.under_way = self.under_way, []
        with record_function(self.label):
            for work, _ in under_way:
                work.wait()
            return _arrived(arriving)


def _sent(x: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Begin one message; its result is of no use before :func:`_arrived`.

    The operator itself: its result is a plain tensor, which may be held before it has arrived, and checkpointing by
    operator keeps it. It cannot write to a place that is given.
    """
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), received, sent, group.group_name)


def _arrived(tensors: Rows) -> Rows:
    return tuple(torch.ops._c10d_functional.wait_tensor(x) for x in tensors)


class Out:
    """The way of rows from tokens to experts, and of their gradients back.

    Args:
        routes: of the parts, in the order of their rows.
        label: the range that a profile shows, in forward and in backward.
    """

    def __init__(self, routes: Sequence[Route], label: str):
        self.rows, self.gradients = ToExperts(routes, label), ToTokens(routes, label)

    def start(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Send all parts, each tensor (rows sent, ...); returns a handle."""
        return _Start.apply(self.rows.send, self.gradients.wait, *tensors)

    def finish(self, part: int, handle: torch.Tensor) -> Rows:
        """Wait for ``part``: each (rows received, ...). In backward its gradient leaves as soon as it is there."""
        send = functools.partial(self.gradients.send, part)
        return _Finish.apply(functools.partial(self.rows.wait, part), send, handle)


class Back:
    """The way of results from experts to tokens, the mirror of :class:`Out`: autograd goes through the parts in reverse
    order, and gradients leave in that order.
    """

    def __init__(self, routes: Sequence[Route], label: str):
        self.rows, self.gradients = ToTokens(routes, label), ToExperts(routes, label, last_first=True)

    def start(self, part: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Send ``part``, each tensor (rows received, ...); returns a handle."""
        wait = functools.partial(self.gradients.wait, part)
        return _Start.apply(functools.partial(self.rows.send, part), wait, *tensors)

    def finish(self, *handles: torch.Tensor) -> Rows:
        """Wait for all parts: each (rows sent, ...)."""
        return _Finish.apply(self.rows.wait, self.gradients.send, *handles)


class _Start(torch.autograd.Function):
    """Forward: send. Backward: wait for the gradients that ``_Finish`` has sent the other way."""

    @staticmethod
    def forward(ctx: Any, send: Callable[..., None], wait: Callable[[], Rows], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.wait = wait
        send(*tensors)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.wait()


class _Finish(torch.autograd.Function):
    """Forward: wait. Backward: send the gradients back, before anything that is computed meanwhile."""

    @staticmethod
    def forward(ctx: Any, wait: Callable[[], Rows], send: Callable[..., None], *handles: torch.Tensor) -> Rows:
        ctx.send, ctx.handles = send, len(handles)
        return wait()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.send(*grads)
        return None, None, *(grads[0].new_empty(0) for _ in range(ctx.handles))
