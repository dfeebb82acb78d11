"""FlexAttention on a CPU: its block masks, and its forward pass."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from model.attention import attention_backend
from model.attention_flex import BLOCK, causal_block_mask, document_block_mask


def documents(length: int, rows: int = 3) -> torch.Tensor:
    """(rows, length) ids: one document, many short ones, and long ones whose ends are not those of blocks."""
    generator = torch.Generator().manual_seed(length)
    short = (torch.rand(length, generator=generator) < 0.1).cumsum(0)
    long = (torch.arange(length) // (BLOCK + 37)).long()
    return torch.stack([torch.zeros(length, dtype=torch.long), short - short[0], long])[:rows].int()


@pytest.mark.parametrize("length", [1, 100, BLOCK, 3 * BLOCK, 5 * BLOCK + 17])
def test_block_mask_is_the_one_that_all_pairs_give(length):
    ids = documents(length)
    found = document_block_mask(ids)
    expected = create_block_mask(
        lambda b, h, q, k: (q >= k) & (ids[b, q] == ids[b, k]), len(ids), None, length, length, device="cpu"
    )
    assert found.shape == expected.shape and found.seq_lengths == expected.seq_lengths
    for kind in ("kv", "full_kv", "q", "full_q"):
        number, which = f"{kind}_num_blocks", f"{kind}_indices"
        assert torch.equal(getattr(found, number), getattr(expected, number)), kind
        for a, b, n in zip(
            getattr(found, which).flatten(0, 2),
            getattr(expected, which).flatten(0, 2),
            getattr(found, number).flatten(),
            strict=True,
        ):
            assert a[:n].tolist() == b[:n].tolist(), kind


def test_causal_mask_is_made_once_for_a_length():
    assert causal_block_mask(40, torch.device("cpu")) is causal_block_mask(40, torch.device("cpu"))
    tokens = torch.zeros(2, 40, dtype=torch.long)
    assert attention_backend("flex").prepare(None, None, tokens) is causal_block_mask(40, torch.device("cpu"))


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("length", [100, 2 * BLOCK + 5])
def test_forward_equals_the_math_backend(kv_heads, with_documents, length):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, length, heads, 16, generator=generator) for heads in (4, kv_heads, kv_heads))
    ids = documents(length) if with_documents else None
    flex, math = attention_backend("flex"), attention_backend("sdpa_math")
    torch.testing.assert_close(flex(q, k, v, flex.prepare(ids)), math(q, k, v, math.prepare(ids)), rtol=1e-4, atol=1e-5)
