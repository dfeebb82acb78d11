"""Grouped matrix products for every dtype: torch's kernel in bfloat16, a loop of plain products elsewhere."""

import torch

try:
    from torch.nn.functional import grouped_mm as _torch_grouped_mm
except ImportError:  # before torch 2.10
    from torch import _grouped_mm as _torch_grouped_mm  # type: ignore[no-redef]


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """One product a group. Group e holds rows (or columns) ends[e - 1] to ends[e] of ``a``.

    Args:
        a: (R, K) with ``b`` (E, K, N): out[rows of e] = a[rows of e] @ b[e]. Rows past the last group are left
            unwritten.
           (M, R) with ``b`` (R, N): out[e] = a[:, rows of e] @ b[rows of e].
        ends: int32 (E,).

    Returns:
        (R, N) or (E, M, N). In bfloat16 the host does not wait; in other dtypes torch's kernel does not compile, and a
        loop over groups reads ``ends`` on the host.
    """
    if a.dtype == torch.bfloat16:
        return _torch_grouped_mm(a, b, offs=ends)
    return _looped(a, b, ends)


def scaled_grouped_mm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    ends: torch.Tensor,
    *,
    dtype: torch.dtype,
    emulate: bool,
    fast: bool = True,
) -> torch.Tensor:
    """:func:`grouped_mm` of float8 operands, each with one scale a row or column along the sum.

    Args:
        a: float8 (R, K), rows in memory, with scales (R,), and ``b`` (E, K, N), columns in memory, with scales (E, N).
           (M, R), rows in memory, with scales (E, M), and ``b`` (R, N), columns in memory, with scales (E, N).
           K, M, N, R and the rows of each group are multiples of 16, and no group is empty: in the second form kernels
           load 16 rows at once, and some releases abort at a sum of no rows.
        dtype: of the result. The kernel knows bfloat16.
        emulate: multiply and add in float32, on any device.
        fast: keep sums as tensor cores do, to 14 bits, over the whole of K rather than over 128 at a time.

    Returns:
        (R, N) or (E, M, N).
    """
    both_in_groups = b.dim() == 2
    if not emulate:
        if both_in_groups:
            a_scale, b_scale = a_scale.flatten(), b_scale.flatten()
        return torch._scaled_grouped_mm(a, b, a_scale, b_scale, ends, out_dtype=dtype, use_fast_accum=fast)
    wide_a, wide_b = a.to(torch.float32), b.to(torch.float32)
    if both_in_groups:
        return (_looped(wide_a, wide_b, ends) * a_scale[:, :, None] * b_scale[:, None, :]).to(dtype)
    return _looped(wide_a * a_scale[:, None], wide_b * b_scale[:, None, :], ends).to(dtype)


@torch.library.custom_op("ablation_trainer::grouped_mm", mutates_args=())
def _looped(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    bounds = [0, *ends.tolist()]
    spans = list(zip(bounds, bounds[1:], strict=False))
    if b.dim() == 2:
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in spans])
    out = a.new_empty(a.shape[0], b.shape[2])
    for expert, (start, end) in enumerate(spans):
        out[start:end] = a[start:end] @ b[expert]
    return out


@_looped.register_fake
def _(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if b.dim() == 2:
        return a.new_empty(ends.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(a.shape[0], b.shape[2])
