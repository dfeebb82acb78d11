import pytest
import torch

from model import row_ops
from model.permute import ids_of, pad_plan, plan_pieces, plan_rows
from model.row_ops import combine, gather_rows
from model.row_reference import gather_sum

EXPERTS, NOWHERE = 5, 5


def example(tokens: int = 11, slots: int = 3):
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(tokens, EXPERTS, generator=generator).topk(slots).indices
    experts[experts == 2] = NOWHERE  # expert 2 gets nothing; some assignments go nowhere
    weights = torch.rand(tokens, slots, generator=generator, dtype=torch.float64)
    return experts, weights * (experts != NOWHERE)


def test_plan_sorts_by_expert_and_keeps_the_order_of_tokens():
    experts, _ = example()
    plan = plan_rows(experts, EXPERTS)
    start = 0
    for expert, end in enumerate(plan.ends.tolist()):
        tokens = plan.token[start:end].tolist()
        assert tokens == sorted(tokens) == torch.where(experts == expert)[0].sort().values.tolist()
        start = end
    for t in range(experts.shape[0]):
        for s in range(experts.shape[1]):
            if experts[t, s] == NOWHERE:
                assert plan.row[t, s] == len(plan.token)
            else:
                assert plan.slot[plan.row[t, s]] == t * experts.shape[1] + s


def test_the_plan_can_be_cut_at_a_known_bound():
    experts, _ = example()
    somewhere = int((experts != NOWHERE).sum())
    whole, cut = plan_rows(experts, EXPERTS), plan_rows(experts, EXPERTS, somewhere)
    assert len(cut.token) == somewhere and torch.equal(cut.token, whole.token[:somewhere])
    assert torch.equal(cut.row == somewhere, whole.row == len(whole.token))


def test_the_weighted_sum_is_that_of_plain_indexing():
    experts, weights = example()
    plan = plan_rows(experts, EXPERTS)
    x = torch.randn(11, 4, dtype=torch.float64)
    scale = torch.randn(len(plan.token), 4, dtype=torch.float64)
    out = combine(gather_rows(x, plan.token, plan.row) * scale, weights, plan.row)

    rows = x[plan.token] * scale
    expected = torch.stack(
        [
            sum(weights[t, s] * rows[plan.row[t, s]] for s in range(3) if experts[t, s] != NOWHERE) + 0 * x[t]
            for t in range(11)
        ]
    )
    torch.testing.assert_close(out, expected)


def test_backward_gathers_and_never_scatters():
    experts, _ = example()
    plan = plan_rows(experts, EXPERTS)
    x = torch.randn(11, 4, dtype=torch.float64, requires_grad=True)
    out = row_ops.gather_sum(gather_rows(x, plan.token, plan.row), plan.token, plan.row)
    with torch.profiler.profile() as seen:
        out.sum().backward()
    names = {event.name for event in seen.events()}
    assert not [n for n in names if "index_put" in n or "index_add" in n or "scatter" in n], names


def test_absent_rows_add_nothing_even_if_they_hold_nan():
    experts, weights = example()
    plan = plan_rows(experts, EXPERTS)
    rows = torch.randn(len(plan.token), 4, dtype=torch.float64)
    poisoned = rows.clone()
    poisoned[int(plan.ends[-1]) :] = torch.nan
    assert torch.equal(gather_sum(poisoned, plan.row, weights), gather_sum(rows, plan.row, weights))
    assert torch.equal(
        gather_sum(rows[:0], torch.zeros(3, 2, dtype=torch.int64)), torch.zeros(3, 4, dtype=torch.float64)
    )


@pytest.mark.parametrize("sizes", [(5,), (2, 1, 2), (1, 1, 1, 1, 1)])
def test_sorted_pieces_have_the_plan_that_a_sort_finds(sizes):
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(0, 4, (3, EXPERTS), generator=generator)
    counts[:, 2] = counts[1, 4] = 0  # an expert without rows, a piece without one
    parts = counts.split(sizes, dim=1)
    found = plan_pieces(counts, sizes, [int(part.sum()) for part in parts])
    for part, mine in zip(parts, found, strict=True):
        ids = torch.cat([torch.arange(part.shape[1]).repeat_interleave(piece) for piece in part])[:, None]
        assert torch.equal(ids_of(mine), ids)
        for a, b in zip(mine, plan_rows(ids, part.shape[1]), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_plan_names_the_experts_that_it_sorts():
    experts, _ = example()
    somewhere = int((experts != NOWHERE).sum())
    for bound in (None, somewhere):
        assert torch.equal(ids_of(plan_rows(experts, EXPERTS, bound)), experts)


def test_rows_of_each_expert_are_padded():
    experts, _ = example()
    plan = plan_rows(experts, EXPERTS)
    padded, somewhere = pad_plan(plan, 4), experts.flatten() != NOWHERE
    rows = torch.diff(padded.ends, prepend=padded.ends.new_zeros(1))
    assert (rows % 4 == 0).all() and (rows >= 4).all() and len(padded.token) % 4 == 0
    slots = torch.arange(experts.numel())[somewhere]
    assert torch.equal(padded.slot[padded.row.flatten()[somewhere]], slots)
    assert torch.equal(padded.token[padded.row.flatten()[somewhere]], slots // experts.shape[1])
    assert int((padded.token == len(experts)).sum()) == len(padded.token) - int(somewhere.sum())
    assert torch.equal(ids_of(padded), experts)
