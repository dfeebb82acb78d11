"""Moving rows to experts and back: a sort of expert ids, and gathers in both directions.

A token's row is copied to each of its experts and the results are added up. Both are written as gathers, forward and
backward: the scatter that autograd would take for the backward of a gather costs about ten times as much, as its rows
collide.
"""

from typing import Any, NamedTuple

import torch


class Plan(NamedTuple):
    """Where rows go. R rows are sorted by expert; T tokens have ``slots`` places each."""

    token: torch.Tensor
    """int64 (R,): the token a row comes from."""
    slot: torch.Tensor
    """int64 (R,): its place among the T * slots assignments."""
    row: torch.Tensor
    """int64 (T, slots): the row of an assignment; R where there is none."""
    ends: torch.Tensor
    """int32 (E,): rows of expert e are ends[e - 1] to ends[e]. Rows from ends[-1] on belong to no expert."""


def plan_rows(experts: torch.Tensor, num_experts: int, max_rows: int | None = None) -> Plan:
    """Sort assignments by expert, stably: tokens of an expert stay in order.

    Args:
        experts: int64 (T, slots); id ``num_experts`` means nowhere and is sorted last.
        max_rows: an upper bound of the assignments that go somewhere, known to the host. None: T * slots.
    """
    flat = experts.flatten()
    rows = flat.numel() if max_rows is None else min(max_rows, flat.numel())
    ordered, slot = flat.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(num_experts, device=flat.device), right=True)
    row = torch.empty_like(slot).scatter(0, slot, torch.arange(flat.numel(), device=flat.device))  # the inverse
    row = torch.where(flat < num_experts, row, rows).view_as(experts)
    slot = slot[:rows]
    return Plan(slot // experts.shape[1], slot, row, ends.to(torch.int32))


def gather_sum(rows: torch.Tensor, row: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """out[t] = sum_s weights[t, s] * rows[row[t, s]], accumulated in at least float32; absent rows add nothing, not
    even a NaN.

    Args:
        rows: (R, D). Rows that no assignment names are never read into the result.
        row: int64 (T, slots), R where absent.
        weights: float32 (T, slots), or None for ones.

    Returns:
        (T, D) in the dtype of ``rows``.
    """
    absent = row >= rows.shape[0]
    found = (
        rows[row.clamp(max=max(rows.shape[0] - 1, 0))] if rows.shape[0] else rows.new_zeros(*row.shape, rows.shape[1])
    )
    found = torch.where(absent[..., None], 0.0, found.to(torch.promote_types(found.dtype, torch.float32)))
    if weights is not None:
        found = found * weights[..., None]
    return found.sum(1).to(rows.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row)
        return x[token]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (row,) = ctx.saved_tensors
        return gather_sum(grad, row), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, token: torch.Tensor, slot: torch.Tensor, row: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, token, slot, row)
        return gather_sum(rows, row, weights)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        rows, weights, token, slot, row = ctx.saved_tensors
        mine = grad[token]
        by_row = (rows.to(weights.dtype) * mine.to(weights.dtype)).sum(-1)  # gradient of the weight of each row
        return (
            (mine * weights.flatten()[slot, None].to(mine.dtype)),
            gather_sum(by_row[:, None], row.flatten()[:, None])[:, 0].view_as(weights),
            None,
            None,
            None,
        )


def permute(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """(T, D) -> (R, D): each row's token. The backward pass sums a token's rows by a gather."""
    return _Permute.apply(x, plan.token, plan.row)


def combine(rows: torch.Tensor, weights: torch.Tensor, plan: Plan) -> torch.Tensor:
    """(R, D), (T, slots) -> (T, D): each token's weighted sum. The backward pass gathers a row's token. Saves
    ``rows``.
    """
    return _Combine.apply(rows, weights, plan.token, plan.slot, plan.row)
