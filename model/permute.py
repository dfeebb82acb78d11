"""Which row goes to which expert: a sort of expert ids. What moves them is in model/row_ops.py."""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class Plan(NamedTuple):
    """Where rows go. R rows are sorted by expert; T tokens have ``slots`` places each."""

    token: torch.Tensor
    """int64 (R,): the token a row comes from; T where a row is padding."""
    slot: torch.Tensor
    """int64 (R,): its place among the T * slots assignments; T * slots where a row is padding."""
    row: torch.Tensor
    """int64 (T, slots): the row of an assignment; R or more where there is none."""
    ends: torch.Tensor
    """int32 (E,): rows of expert e are ends[e - 1] to ends[e]. Rows from ends[-1] on belong to no expert."""


def plan_rows(experts: torch.Tensor, num_experts: int, max_rows: int | None = None) -> Plan:
    """Sort assignments by expert, stably: tokens of an expert stay in order.

    Args:
        experts: int64 (T, slots); id ``num_experts`` means nowhere and is sorted last.
        max_rows: an upper bound of the assignments that go somewhere, known to the host. None: T * slots.
    """
    flat = experts.flatten().int()  # a radix sort takes half the passes of int64
    rows = flat.numel() if max_rows is None else min(max_rows, flat.numel())
    ordered, slot = flat.sort(stable=True)
    ids = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(ordered, ids, right=True)
    row = torch.empty_like(slot).scatter(0, slot, torch.arange(flat.numel(), device=flat.device))  # the inverse
    row = torch.where(flat < num_experts, row, rows).view_as(experts)
    slot = slot[:rows]
    return Plan(slot // experts.shape[1], slot, row, ends.to(torch.int32))


def plan_padded_rows(experts: torch.Tensor, num_experts: int, max_rows: int | None, multiple: int) -> Plan:
    """:func:`plan_rows` with the rows of every expert, also of one without any, padded to a multiple of ``multiple``.

    The number of rows is the most that there may be, a multiple too; those past ``ends`` are padding as well.
    """
    plan = plan_rows(experts, num_experts, max_rows)
    ends = plan.ends.long()
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = ((counts + multiple - 1) // multiple).clamp(min=1) * multiple
    padded_ends = padded.cumsum(0)
    rows = (-(-len(plan.token) // multiple) + num_experts) * multiple
    number = torch.arange(rows, device=experts.device)
    expert = torch.searchsorted(padded_ends, number, right=True)
    last = expert.clamp(max=num_experts - 1)
    place = number - (padded_ends - padded)[last]
    real = (expert < num_experts) & (place < counts[last])
    found = torch.where(real, (ends - counts)[last] + place, 0)
    nowhere = experts.new_full((1,), len(experts)), experts.new_full((1,), experts.numel())
    token, slot = (torch.where(real, F.pad(x, (0, 1))[found], none) for x, none in zip(plan[:2], nowhere, strict=True))
    shift = F.pad((padded_ends - padded) - (ends - counts), (0, 1))[experts]
    row = torch.where(experts < num_experts, plan.row + shift, rows)
    return Plan(token, slot, row, padded_ends.to(torch.int32))
