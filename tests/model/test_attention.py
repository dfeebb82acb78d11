import math

import pytest
import torch

from config.attention import KERNELS
from config.errors import ConfigError
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


def test_the_registry_and_the_table_of_what_kernels_can_do_have_the_same_names():
    assert list(BACKENDS) == list(KERNELS)
    for name, kernel in KERNELS.items():
        backend = attention_backend(name)
        assert backend.name == name
        assert kernel.blocks == ("" if backend.blocks is None else "masked" if backend.blocks.masks else "plain")


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.cpu])
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


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn"])
def test_kernels_without_masks_refuse_documents(name):
    with pytest.raises(ConfigError, match=name):
        attention_backend(name).prepare(torch.zeros(1, 4, dtype=torch.int32))
    assert attention_backend(name).prepare(None) is None
