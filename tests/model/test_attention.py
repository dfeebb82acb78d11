import math

import pytest
import torch

from model.attention import BACKENDS, attention_backend


def reference(q, k, v, document_ids=None):
    """Softmax attention in float64, one query at a time. Shapes as in AttentionBackend."""
    q, k, v = q.double(), k.double(), v.double()
    B, S, H, D = q.shape
    group = H // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            for i in range(S):
                allowed = [j for j in range(i + 1) if document_ids is None or document_ids[b, j] == document_ids[b, i]]
                scores = torch.stack([q[b, i, h] @ k[b, j, h // group] for j in allowed]) / math.sqrt(D)
                out[b, i, h] = torch.softmax(scores, 0) @ v[b, allowed, h // group]
    return out


@pytest.mark.parametrize("name", [*BACKENDS, "auto"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_backend_equals_the_float64_reference_forward_and_backward(name, kv_heads, documents):
    q = torch.randn(2, 12, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, 12, kv_heads, 8, requires_grad=True) for _ in range(2))
    ids = torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 4 + [2] * 7], dtype=torch.int32) if documents else None
    backend = attention_backend(name)
    out = backend(q, k, v, backend.prepare(ids))
    expected = reference(q, k, v, ids)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), (q, k, v))
    want = torch.autograd.grad((expected * weight.double()).sum(), (q, k, v))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_mask_hides_other_documents_and_the_future():
    backend = attention_backend("sdpa")
    q, k, v = (torch.randn(1, 6, 2, 4) for _ in range(3))
    ids = torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    before = backend(q, k, v, backend.prepare(ids))
    k[:, :3], v[:, :3] = 9.0, 9.0  # the first document changes
    k[:, 5], v[:, 5] = -9.0, -9.0  # and so does the last token
    after = backend(q, k, v, backend.prepare(ids))
    torch.testing.assert_close(before[:, 3:5], after[:, 3:5])
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_the_reference_backend_runs_the_math_kernel():
    assert BACKENDS["sdpa_math"].kernels == [torch.nn.attention.SDPBackend.MATH]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", ["sdpa", "sdpa_math"])
def test_backend_on_a_gpu_in_bfloat16_equals_float64(name, kv_heads, documents):
    torch.manual_seed(kv_heads)
    q = torch.randn(2, 512, 8, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k, v = (
        torch.randn(2, 512, kv_heads, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(2)
    )
    ids = (torch.arange(512, device="cuda") // 100).int().expand(2, -1) if documents else None
    backend = attention_backend(name)
    out = backend(q, k, v, backend.prepare(ids))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = attention_backend("sdpa_math")(*exact, backend.prepare(ids))
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), (q, k, v))
    want = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for a, b in zip((out, *got), (expected, *want), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_causal_grouped_queries_run_a_fused_kernel_on_a_gpu():
    q = torch.randn(1, 1024, 16, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 1024, 4, 64, dtype=torch.bfloat16, device="cuda")
    backend = attention_backend("auto")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        backend(q, k, k, None)
    kernels = [event.key for event in profile.key_averages()]
    assert any("flash" in name or "cudnn" in name or "sdpa" in name for name in kernels), kernels
