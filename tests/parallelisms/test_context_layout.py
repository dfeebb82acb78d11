"""Who holds what of a sequence, what each pair of ranks computes, and what all of it weighs."""

import itertools

import pytest
import torch

from parallelisms.context_layout import Layout

LAYOUTS = [Layout(name, n) for name in ("zigzag", "contiguous") for n in (2, 3, 4, 8)]
NAMES = [f"{layout.name} {layout.degree}" for layout in LAYOUTS]


@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_ranks_hold_every_place_once_and_in_order(layout):
    held = [layout.places(rank, 48) for rank in range(layout.degree)]
    assert torch.cat(held).sort().values.tolist() == list(range(48))
    for places in held:
        assert len(places) == 48 // layout.degree and places.tolist() == sorted(places.tolist())


def test_zigzag_pairs_the_first_piece_with_the_last():
    assert Layout("zigzag", 4).places(1, 16).tolist() == [2, 3, 12, 13]
    assert Layout("contiguous", 4).places(1, 16).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_blocks_are_exactly_what_each_query_may_see(layout, causal):
    length, seen = 48 // layout.degree, torch.zeros(48, 48, dtype=torch.int64)
    for q_rank, k_rank in itertools.product(range(layout.degree), repeat=2):
        block = layout.block(q_rank, k_rank, length, causal)
        if block is not None:
            rows = layout.places(q_rank, 48)[block.q]
            columns = layout.places(k_rank, 48)[block.k]
            part = torch.ones(len(rows), len(columns), dtype=torch.int64)
            seen[rows[:, None], columns] += part.tril() if block.causal else part
    expected = torch.ones(48, 48, dtype=torch.int64)
    assert torch.equal(seen, expected.tril() if causal else expected)


def pairs(layout: Layout, rank: int, length: int) -> int:
    """Products of a query with a key that ``rank`` computes, ``length`` tokens a rank."""
    total = 0
    for other in range(layout.degree):
        block = layout.block(rank, other, length, causal=True)
        if block is not None:
            rows, columns = (len(range(length)[s]) for s in (block.q, block.k))
            total += rows * (rows + 1) // 2 if block.causal else rows * columns
    return total


@pytest.mark.parametrize("n", [2, 4, 8])
def test_zigzag_shares_causal_work_evenly_and_contiguous_does_not(n):
    length = 4096 // n
    for name, spread in (("zigzag", 1.0), ("contiguous", (2 * n - 1) / n)):
        work = [pairs(Layout(name, n), rank, length) for rank in range(n)]
        assert sum(work) == 4096 * 4097 // 2, "nothing is computed that the mask would hide"
        busiest = max(work) / (sum(work) / n)
        assert busiest == pytest.approx(spread, rel=0.01)
        assert (busiest < 1.05) == (name == "zigzag")


def test_a_part_has_places_as_positions_and_whole_documents():
    tokens = torch.arange(16).view(2, 8)
    ids = torch.zeros(2, 8, dtype=torch.int32)
    part = Layout("zigzag", 2).part({"tokens": tokens, "labels": tokens + 1, "document_ids": ids}, 1)
    assert part["positions"].tolist() == [[2, 3, 4, 5]] * 2
    assert part["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(part["labels"], part["tokens"] + 1) and part["document_ids"] is ids
    within = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)
    part = Layout("zigzag", 2).part({"tokens": tokens, "positions": within, "numbers": tokens}, 1)
    assert part["positions"].tolist() == [[2, 0, 1, 2]] * 2 and torch.equal(part["numbers"], part["tokens"])
