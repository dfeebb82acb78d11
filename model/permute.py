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


def plan_rows(
    experts: torch.Tensor | None, num_experts: int, max_rows: int | None = None, counts: torch.Tensor | None = None
) -> Plan:
    """Sort assignments by expert, stably: tokens of an expert stay in order.

    Args:
        experts: int64 (T, slots); id ``num_experts`` means nowhere and is sorted last. None with ``counts``.
        max_rows: an upper bound of the assignments that go somewhere, known to the host. None: T * slots.
        counts: see :func:`plan_pieces`; ``max_rows`` is then T.
    """
    if counts is not None:
        assert max_rows is not None
        return plan_pieces(counts, max_rows)
    assert experts is not None
    flat = experts.flatten().int()  # a radix sort takes half the passes of int64
    rows = flat.numel() if max_rows is None else min(max_rows, flat.numel())
    ordered, slot = flat.sort(stable=True)
    ids = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    ends = torch.searchsorted(ordered, ids, right=True)
    row = torch.empty_like(slot).scatter(0, slot, torch.arange(flat.numel(), device=flat.device))  # the inverse
    row = torch.where(flat < num_experts, row, rows).view_as(experts)
    slot = slot[:rows]
    return Plan(slot // experts.shape[1], slot, row, ends.to(torch.int32))


def plan_pieces(counts: torch.Tensor, tokens: int) -> Plan:
    """The plan of tokens that are sorted already, piece by piece: additions alone.

    Args:
        counts: int64 (P, E): T tokens of one slot each lie in P pieces, piece p has counts[p, e] of expert e, in the
            order of experts.
        tokens: T, the sum of ``counts``.
    """
    arrived, placed = counts.flatten(), counts.t().flatten()  # lengths of runs, as they lie and as they are to lie
    ends = placed.cumsum(0)
    begins = (arrived.cumsum(0) - arrived).view_as(counts)
    shift = begins - (ends - placed).view_as(counts.t()).t()  # (P, E): from where a run is to lie to where it lies
    number = torch.arange(tokens, device=counts.device)
    token = number + torch.repeat_interleave(shift.t().flatten(), placed, output_size=tokens)
    row = number - torch.repeat_interleave(shift.flatten(), arrived, output_size=tokens)
    return Plan(token, token, row[:, None], ends.view_as(counts.t())[:, -1].int())


def experts_in_pieces(counts: torch.Tensor, tokens: int) -> torch.Tensor:
    """int64 (T, 1): the ids that :func:`plan_pieces` does without."""
    ids = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return torch.repeat_interleave(ids, counts.flatten(), output_size=tokens)[:, None]


def plan_padded_rows(
    experts: torch.Tensor | None,
    num_experts: int,
    max_rows: int | None,
    multiple: int,
    counts: torch.Tensor | None = None,
) -> Plan:
    """:func:`plan_rows` with the rows of every expert, also of one without any, padded to a multiple of ``multiple``.

    The number of rows is the most that there may be, a multiple too; those past ``ends`` are padding as well.
    """
    plan = plan_rows(experts, num_experts, max_rows, counts)
    if experts is None:
        assert counts is not None and max_rows is not None
        experts = experts_in_pieces(counts, max_rows)
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
