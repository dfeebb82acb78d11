"""The reference block kernel against autograd, whole and in pieces."""

import pytest
import torch

from model.attention_blocks import ReferenceBlocks

B, S, H, D = 2, 12, 4, 8


def inputs(kv_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    heads = (H, kv_heads, kv_heads, H)
    return tuple(torch.randn(B, S, h, D, generator=generator, dtype=torch.float64).to(dtype) for h in heads)


def autograd(q, k, v, dout, allowed):
    """Output and gradients in float64 by softmax and autograd; ``allowed`` (B, S, S) has a key in every row."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = H // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) / D**0.5
    p = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(group, 2))
    return (
        out.detach(),
        scores.masked_fill(~allowed[:, None], -torch.inf).logsumexp(-1).detach(),
        torch.autograd.grad(out, (q, k, v), dout.double()),
    )


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def documents() -> torch.Tensor:
    """(B, S, S): same document; lengths differ between rows."""
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 3 + [2] * 8])
    return ids[:, :, None] == ids[:, None, :]


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal, masked", [(True, False), (False, False), (True, True), (False, True)])
def test_one_block_is_attention(dtype, bound, kv_heads, causal, masked):
    q, k, v, dout = inputs(kv_heads, dtype)
    mask = documents() if masked else None
    allowed = documents() if masked else torch.ones(B, S, S, dtype=torch.bool)
    expected, expected_lse, expected_grads = autograd(q, k, v, dout, allowed.tril() if causal else allowed)
    kernel = ReferenceBlocks(queries=5)
    out, lse = kernel.forward(q, k, v, causal, mask)
    assert out.dtype == dtype and lse.shape == (B, H, S)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert relative(out, expected) < bound and relative(lse, expected_lse) < bound
    for grad, reference in zip(kernel.backward(dout, q, k, v, out, lse, causal, mask), expected_grads, strict=True):
        assert grad.dtype == dtype and relative(grad, reference) < bound


def test_blocks_with_the_row_s_lse_add_up_to_the_gradients():
    """Three unequal blocks of keys; some rows see no key of some block."""
    q, k, v, dout = inputs(2, torch.float64)
    allowed = documents().tril()
    out, lse, expected = autograd(q, k, v, dout, allowed)
    kernel = ReferenceBlocks()
    pieces = [slice(0, 3), slice(3, 4), slice(4, S)]
    partial = [kernel.forward(q, k[:, s], v[:, s], False, allowed[:, :, s]) for s in pieces]
    merged = sum(o * (piece_lse - lse).exp().transpose(1, 2).unsqueeze(-1) for o, piece_lse in partial)
    assert relative(merged, out) < 1e-12
    grads = [kernel.backward(dout, q, k[:, s], v[:, s], out, lse, False, allowed[:, :, s]) for s in pieces]
    assert relative(sum(g[0] for g in grads), expected[0]) < 1e-12
    assert relative(torch.cat([g[1] for g in grads], 1), expected[1]) < 1e-12
    assert relative(torch.cat([g[2] for g in grads], 1), expected[2]) < 1e-12


def test_a_query_without_keys_is_zero_and_sends_no_gradient():
    q, k, v, dout = inputs(2, torch.float32)
    mask = torch.ones(B, S, S, dtype=torch.bool)
    mask[0, 3] = False
    kernel = ReferenceBlocks()
    out, lse = kernel.forward(q, k, v, False, mask)
    assert (out[0, 3] == 0).all() and (lse[0, :, 3] == -torch.inf).all()
    assert lse[1].isfinite().all()
    only = torch.zeros_like(dout)
    only[0, 3] = dout[0, 3]
    for grad in kernel.backward(only, q, k, v, out, lse, False, mask):
        assert (grad == 0).all()
