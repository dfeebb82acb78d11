"""Which row goes to which expert: a sort of expert ids. What moves them is in model/row_ops.py."""

import functools
from collections.abc import Sequence
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


def plan_rows(experts: torch.Tensor | Plan, num_experts: int, max_rows: int | None = None) -> Plan:
    """Sort assignments by expert, stably: tokens of an expert stay in order.

    Args:
        experts: int64 (T, slots); id ``num_experts`` means nowhere and is sorted last. A plan stays as it is.
        max_rows: an upper bound of the assignments that go somewhere, known to the host. None: T * slots.
    """
    if isinstance(experts, Plan):
        return experts
    flat = experts.flatten().int()  # a radix sort takes half the passes of int64
    rows = flat.numel() if max_rows is None else min(max_rows, flat.numel())
    ordered, slot = flat.sort(stable=True)
    ids = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(ordered, ids, right=True)
    row = torch.empty_like(slot).scatter(0, slot, torch.arange(flat.numel(), device=flat.device))  # the inverse
    row = torch.where(flat < num_experts, row, rows).view_as(experts)
    slot = slot[:rows]
    return Plan(slot // experts.shape[1], slot, row, ends.to(torch.int32))


def plan_pieces(counts: torch.Tensor, sizes: tuple[int, ...], rows: Sequence[int]) -> list[Plan]:
    """The plans of tokens that are sorted already, piece by piece: additions alone, for all parts at once.

    Args:
        counts: int64 (P, E): piece p has counts[p, e] tokens of expert e, of one slot each.
        sizes: E as a sum, the experts of each part. A part has the tokens of its experts: those of piece 0, in the
            order of experts, then those of piece 1.
        rows: tokens of each part.

    Returns:
        A plan for each part; tokens, rows and experts are numbered within it.
    """
    runs = _runs(len(counts), sizes, counts.device)
    placed = counts.t().flatten()  # lengths of runs as they are to lie, expert by expert; then as they lie
    arrived = placed[runs.arrival]
    ends = placed.cumsum(0)
    begins = ends - placed
    shift = arrived.cumsum(0) - arrived - begins[runs.arrival]  # from where a run is to lie to where it lies
    before = begins[runs.first]  # rows of the parts before
    number = torch.arange(sum(rows), device=counts.device)
    token = number + torch.repeat_interleave(shift[runs.place] - before, placed, output_size=len(number))
    row = number - torch.repeat_interleave(shift + before[runs.arrival], arrived, output_size=len(number))
    last = (ends - before).view(-1, len(counts))[:, -1].int()
    return [
        Plan(t, t, r[:, None], e)
        for t, r, e in zip(token.split(list(rows)), row.split(list(rows)), last.split(sizes), strict=True)
    ]


class _Runs(NamedTuple):
    """Runs of one expert in one piece, numbered expert by expert. All int64 (P * E,)."""

    arrival: torch.Tensor
    """The runs in the order in which they lie."""
    place: torch.Tensor
    """Where a run is in that order."""
    first: torch.Tensor
    """The first run of a run's part."""


@functools.cache
def _runs(pieces: int, sizes: tuple[int, ...], device: torch.device) -> _Runs:
    parts = torch.arange(sum(sizes) * pieces).view(-1, pieces).split(sizes)
    arrival = torch.cat([part.t().flatten() for part in parts])
    first = torch.cat([part[:1, :1].expand_as(part).flatten() for part in parts])
    return _Runs(arrival.to(device), arrival.argsort().to(device), first.to(device))


def ids_of(plan: Plan) -> torch.Tensor:
    """int64 (T, slots): the ids that ``plan`` sorts; the number of experts means nowhere."""
    return torch.searchsorted(plan.ends.long(), plan.row, right=True)


def pad_plan(plan: Plan, multiple: int) -> Plan:
    """``plan`` with the rows of every expert, also of one without any, padded to a multiple of ``multiple``.

    The number of rows is the most that there may be, a multiple too; those past ``ends`` are padding as well.
    """
    experts, num_experts = ids_of(plan), len(plan.ends)
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
