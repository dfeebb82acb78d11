"""Stand-ins for the flash-attn packages on a CPU: their entry points, with the packages' own names, order and
defaults of arguments, computed by plain operators.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from model.attention_blocks import ReferenceBlocks

REFERENCE = ReferenceBlocks()
calls: list[str] = []


def pieces(bounds: torch.Tensor | None, tokens: torch.Tensor) -> list[slice]:
    """Sequences of ``tokens`` (total, H, D)."""
    edges = bounds.tolist()
    assert bounds.dtype == torch.int32 and edges[0] == 0 and edges[-1] == len(tokens) and edges == sorted(edges)
    return [slice(a, b) for a, b in zip(edges, edges[1:], strict=False) if b > a]


def forward(q, k, v, bounds, causal):
    """Output and lse of each sequence."""
    if bounds is None:
        return REFERENCE.forward(q, k, v, causal, None)
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], len(q)), torch.nan, dtype=torch.float32)
    for piece in pieces(bounds, q):
        one, its = REFERENCE.forward(q[None, piece], k[None, piece], v[None, piece], causal, None)
        out[piece], lse[:, piece] = one[0], its[0]
    return out, lse


def backward(dout, q, k, v, out, lse, bounds, causal, grads):
    """Fill ``grads`` in place."""
    if bounds is None:
        found = REFERENCE.backward(dout, q, k, v, out, lse, causal, None)
        for into, grad in zip(grads, found, strict=True):
            into.copy_(grad)
        return
    for piece in pieces(bounds, q):
        parts = (x[None, piece] for x in (dout, q, k, v, out))
        found = REFERENCE.backward(*parts, lse[None, :, piece], causal, None)
        for into, grad in zip(grads, found, strict=True):
            into[piece] = grad[0]


# flash-attn 2.8, flash_attn/flash_attn_interface.py: backward writes into dq, dk, dv and returns softmax_d.
def _flash_attn_forward(
    q,
    k,
    v,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    return_softmax,
):
    calls.append("forward")
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0) and alibi_slopes is None
    assert softmax_scale == q.shape[-1] ** -0.5 and not return_softmax and q.dim() == 4
    return *forward(q, k, v, None, causal), torch.empty(0), torch.empty(2)


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left=-1,
    window_size_right=-1,
    softcap=0.0,
    alibi_slopes=None,
    return_softmax=False,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    zero_tensors=False,
):
    calls.append("varlen forward")
    assert cu_seqlens_q.equal(cu_seqlens_k) and max_seqlen_q == max_seqlen_k >= cu_seqlens_q.diff().max()
    assert (dropout_p, softmax_scale) == (0.0, q.shape[-1] ** -0.5) and q.dim() == 3
    return *forward(q, k, v, cu_seqlens_q, causal), torch.empty(0), torch.empty(2)


def _flash_attn_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
):
    calls.append("backward" + " deterministic" * deterministic)
    assert (dropout_p, softmax_scale) == (0.0, q.shape[-1] ** -0.5)
    backward(dout, q, k, v, out, softmax_lse, None, causal, (dq, dk, dv))
    return torch.empty(0)


def _flash_attn_varlen_backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_size_left,
    window_size_right,
    softcap,
    alibi_slopes,
    deterministic,
    rng_state=None,
    zero_tensors=False,
):
    calls.append("varlen backward" + " deterministic" * deterministic)
    assert cu_seqlens_q.equal(cu_seqlens_k) and max_seqlen_q == max_seqlen_k >= cu_seqlens_q.diff().max()
    backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, causal, (dq, dk, dv))
    return torch.empty(0)


# flash-attn-4 4.0.0b36, flash_attn/cute/interface.py, as far as it is used: five results, the last three for MLA.
def _flash_attn_fwd(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    softmax_scale=None,
    causal=False,
    return_lse=False,
):
    calls.append("forward" if cu_seqlens_q is None else "varlen forward")
    assert return_lse and qv is seqused_q is seqused_k is softmax_scale is None
    return *forward(q, k, v, cu_seqlens_q, causal), None, None, None


def _flash_attn_bwd(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    *,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
):
    calls.append(("backward" if cu_seqlens_q is None else "varlen backward") + " deterministic" * deterministic)
    assert softmax_scale is None and lse.dtype == torch.float32
    backward(dout, q, k, v, out, lse, cu_seqlens_q, causal, (dq, dk, dv))
    return dq, dk, dv


@contextmanager
def stand_ins() -> Iterator[list[str]]:
    """Both packages importable; yields the names of calls, in order."""
    calls.clear()
    flash, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    cute, cute_interface = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.interface")
    flash.flash_attn_interface, flash.cute, cute.interface = interface, cute, cute_interface  # type: ignore[attr-defined]
    for name in (
        "_flash_attn_forward",
        "_flash_attn_varlen_forward",
        "_flash_attn_backward",
        "_flash_attn_varlen_backward",
    ):
        setattr(interface, name, globals()[name])
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        setattr(cute_interface, name, globals()[name])
    modules = {m.__name__: m for m in (flash, interface, cute, cute_interface)}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield calls
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})
