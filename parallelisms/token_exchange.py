"""Rows that travel between ranks which hold different experts, out and back, forward and backward.

A journey out copies a token to each rank it needs and sends it (gather, all-to-all); the way back returns what came of
it and adds up a token's results (all-to-all, gather and sum). Each is the other's backward. A collective is split in
two autograd functions, one that starts it and one that waits, so that what is computed between the two overlaps with
it in forward and, as autograd runs backwards, in backward too.

Numbers of rows differ between ranks and may be zero. Every rank runs the same operations all the same, so no rank
waits for another for ever and every parameter gets a gradient.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

Rows = tuple[torch.Tensor, ...]
"""Tensors with a row for each row that travels."""


class Route(NamedTuple):
    """Which rows go where. R rows are sorted by the rank they go to; T tokens have ``slots`` places each."""

    token: torch.Tensor
    """int64 (R,): the token a row is a copy of."""
    slot: torch.Tensor
    """int64 (R,): its place among the T x slots destinations."""
    row: torch.Tensor
    """int64 (T, slots): the row that goes to a destination; R where none does."""
    sent: list[int]
    """Rows this rank sends to each rank of the group, itself included."""
    received: list[int]
    """Rows it receives from each."""
    assignments: int
    """Choices of a local expert among the rows received."""
    group: dist.ProcessGroup


def plan(destinations: torch.Tensor, choices: torch.Tensor, group: dist.ProcessGroup) -> Route:
    """Sort rows by destination and tell every rank how many to expect. The host waits for the device, once.

    Args:
        destinations: int64 (T, slots), ranks of ``group``; its size means nowhere.
        choices: int64 (T, slots), the rank of each chosen expert; its size means nowhere. The same as ``destinations``
            where a row is sent for each.
        group: ranks that hold different experts.
    """
    n, flat = group.size(), destinations.flatten()
    ordered, slot = flat.sort(stable=True)
    rank = torch.arange(n, device=flat.device)
    rows = torch.searchsorted(ordered, rank, right=True) - torch.searchsorted(ordered, rank)
    chosen = (choices.flatten()[:, None] == rank).sum(0)
    out = torch.stack([rows, chosen], dim=1)  # (n, 2)
    expected = torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_to_all_single(out, [1] * n, [1] * n, group.group_name)
    )
    counts = torch.cat([rows[None], expected.t()]).tolist()
    total = sum(counts[0])
    place = torch.empty_like(slot).scatter(0, slot, torch.arange(flat.numel(), device=flat.device))  # the inverse
    row = torch.where(flat < n, place, total).view_as(destinations)
    slot = slot[:total]
    return Route(slot // destinations.shape[1], slot, row, counts[0], counts[1], sum(counts[2]), group)


def spread(x: torch.Tensor, route: Route) -> torch.Tensor:
    """(T, D) -> (R, D): the rows that are to be sent."""
    return _Spread.apply(x, route.token, route.row)


def collect(rows: torch.Tensor, route: Route) -> torch.Tensor:
    """(R, D) -> (T, D): the sum of each token's rows, in at least float32."""
    return _Collect.apply(rows, route.token, route.row)


def _gather_sum(rows: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """out[t] = sum of rows[row[t]] over slots, in at least float32. A gather: rows of a scatter would collide."""
    if len(rows) == 0:
        return rows.new_zeros(row.shape[0], rows.shape[1])
    found = rows[row.clamp(max=len(rows) - 1)].to(torch.promote_types(rows.dtype, torch.float32))
    return torch.where((row < len(rows))[..., None], found, 0.0).sum(1).to(rows.dtype)


_compiled_gather_sum = torch.compile(_gather_sum, dynamic=True)


def _summed(rows: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """``_gather_sum``, as one kernel on a GPU: eager, it would write a float32 copy of every row."""
    return _compiled_gather_sum(rows, row) if rows.is_cuda and len(rows) else _gather_sum(rows, row)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row)
        return x[token]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (row,) = ctx.saved_tensors
        return _summed(grad, row), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, token: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token)
        return _summed(rows, row)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return grad[token], None, None


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
