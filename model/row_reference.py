"""Rows on their way to experts, through SwiGLU and back, in plain torch operators: what runs on a CPU, and what
model/row_kernels.py does in one pass each.

Everything moves by gathers, forward and backward: the scatter that autograd would take for the backward of a gather
costs about ten times as much, as its rows collide.
"""

import torch


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def gather_sum(rows: torch.Tensor, row: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """out[t] = sum_s weights[t, s] * rows[row[t, s]], slot after slot in at least float32; absent rows add nothing, not
    even a NaN.

    Args:
        rows: (R, D). Rows that no assignment names are never read into the result.
        row: int64 (T, slots), R or more where absent.
        weights: float32 (T, slots), or None for ones.

    Returns:
        (T, D) in the dtype of ``rows``.
    """
    total = torch.zeros(len(row), rows.shape[1], dtype=_wide(rows), device=rows.device)
    if len(rows):
        for s, index in enumerate(row.unbind(1)):
            found = rows[index.clamp(max=len(rows) - 1)].to(total.dtype)
            if weights is not None:
                found = found * weights[:, s, None]
            total = total + torch.where((index < len(rows))[:, None], found, 0.0)
    return total.to(rows.dtype)


def swiglu(h: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up in float32: (R, 2 hidden), interleaved, -> (R, hidden) in the dtype of ``h``."""
    gate, up = h.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.to(_wide(h)), up.to(_wide(h))
    return (gate * gate.sigmoid() * up).to(h.dtype)


def swiglu_backward_of_rows(
    h: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward of ``weight * swiglu(h)`` at the row gradient W2^T g, and what the other gradients need.

    Args:
        h: (R, 2 hidden), interleaved.
        grad: (R, hidden), W2^T g of the row's token, without the routing weight.
        weight: float32 (R,).

    Returns:
        gradient of h (R, 2 hidden), weight * swiglu(h) (R, hidden), gradient of weight float32 (R,).
    """
    gate, up = h.unflatten(-1, (-1, 2)).unbind(-1)
    gate, up, grad = gate.to(_wide(h)), up.to(_wide(h)), grad.to(_wide(h))
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    active, weight = silu * up, weight[:, None].to(gate.dtype)
    scaled = weight * grad
    d_gate = scaled * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    d_h = torch.stack([d_gate, scaled * silu], dim=-1).flatten(-2).to(h.dtype)
    return d_h, (weight * active).to(h.dtype), (grad * active).sum(-1)


def swiglu_backward(
    h: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`swiglu_backward_of_rows` with weights where the router has them.

    Args:
        h, grad: as there.
        weights: float32 (T, slots).
        slot: int64 (R,), the row's place among T * slots.
        ends: int32 (E,); rows from ends[-1] on belong to no expert, and what is returned for them means nothing.

    Returns:
        gradient of h (R, 2 hidden), weight * swiglu(h) (R, hidden), gradient of weights (T, slots).
    """
    d_h, active, d_weight = swiglu_backward_of_rows(h, grad, weights.flatten()[slot])
    d_weight = torch.where(torch.arange(len(h), device=h.device) < ends[-1], d_weight, 0.0)
    d_weights = torch.zeros_like(weights).flatten().scatter(0, slot, d_weight.to(weights.dtype))  # no two in a place
    return d_h, active, d_weights.view_as(weights)


def zero_empty_(gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the weight gradient (E, ...) of experts without rows: grouped kernels may leave it unwritten
    (pytorch #174314).
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return gradient.masked_fill_((counts == 0)[:, None, None], 0.0)
