"""Losses that hold a chunk of the logits at a time: some rows of all columns, or all rows of some columns.

Both are exact. ``RowChunked`` computes the gradient on the way forward, while a chunk's logits are there: no product
is done twice, and the gradient of the head's matrix waits in float32 for the backward pass. ``VocabularyChunked``
keeps one number a token and computes its logits again in the backward pass: a fourth product with the head, and no
sum of its matrix's gradient over chunks.
"""

from collections.abc import Callable
from typing import Any

import torch

from model.compute_dtype import compute_dtype
from model.loss import IGNORE, Compiler, HeadLoss, combined, logits_gradient, partial_softmax, wide

Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class RowChunked(HeadLoss):
    """Logits of ``rows`` tokens at a time.

    Args:
        rows: tokens a chunk; the last one may have fewer.
    """

    def __init__(self, rows: int, soft_cap: float = 0.0, z_loss_coeff: float = 0.0):
        super().__init__(soft_cap, z_loss_coeff)
        self.rows = rows
        self.partial, self.gradient = partial_softmax, logits_gradient

    def compile(self, compiler: Compiler) -> None:
        """Compile what is between the matrix products: a chunk then has no wide copy in memory."""
        self.partial, self.gradient = compiler(partial_softmax), compiler(logits_gradient)

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As :meth:`HeadLoss.__call__`."""
        return with_gradient(self.forward_backward, hidden, weight, labels)

    def forward_backward(
        self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, gradients: bool
    ) -> Parts:
        """The loss of (T, dim), and its gradients unless they are not wanted; see :func:`with_gradient`."""
        first = self.vocabulary.first(len(weight))
        total = torch.zeros((), dtype=wide(hidden.dtype), device=hidden.device)
        by_hidden = torch.empty_like(hidden) if gradients else None
        by_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if gradients else None
        for h, y, place in zip(
            hidden.split(self.rows), labels.split(self.rows), range(0, len(hidden), self.rows), strict=True
        ):
            logits = h @ weight.T
            valid = y != IGNORE
            loss, log_sum = combined(self.vocabulary, *self.partial(logits, y - first, self.soft_cap))
            total += torch.where(valid, loss, 0).sum()
            if by_hidden is None or by_weight is None:
                continue
            scale = valid.to(log_sum.dtype)
            grad = self.gradient(logits, y - first, log_sum, scale, self.soft_cap, self.z_loss_coeff)
            del logits
            torch.mm(grad, weight, out=by_hidden[place : place + len(h)])
            add_product(by_weight, grad.T, h)
            del grad
        return total, by_hidden, by_weight


class VocabularyChunked(HeadLoss):
    """Logits of ``columns`` vocabulary entries at a time, with an online softmax (Milakov and Gimelshein, arXiv
    1805.02867).

    Args:
        columns: vocabulary entries a chunk; the last one may have fewer.
    """

    def __init__(self, columns: int, soft_cap: float = 0.0, z_loss_coeff: float = 0.0):
        super().__init__(soft_cap, z_loss_coeff)
        self.columns = columns
        self.partial, self.gradient = partial_softmax, logits_gradient

    def compile(self, compiler: Compiler) -> None:
        """As :meth:`RowChunked.compile`."""
        self.partial, self.gradient = compiler(partial_softmax), compiler(logits_gradient)

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """As :meth:`HeadLoss.__call__`."""
        hidden = hidden.flatten(0, 1)
        return _VocabularyChunked.apply(hidden, weight, labels.flatten(), self, compute_dtype(hidden))


class _VocabularyChunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        loss: VocabularyChunked,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            h, vocabulary = hidden.to(dtype), loss.vocabulary
            shape, place = hidden.shape[:1], vocabulary.first(len(weight))
            largest = torch.full(shape, -torch.inf, dtype=wide(dtype), device=hidden.device)
            exponentials, target = torch.zeros_like(largest), torch.zeros_like(largest)
            for w in weight.split(loss.columns):
                found, sums, mine = loss.partial(h @ w.to(dtype).T, labels - place, loss.soft_cap)
                before, largest = largest, torch.maximum(largest, found)
                exponentials = exponentials * (before - largest).exp() + sums * (found - largest).exp()
                target += mine
                place += len(w)
            each, log_sum = combined(vocabulary, largest, exponentials, target)
            ctx.save_for_backward(hidden, weight, labels, log_sum)
            ctx.loss, ctx.dtype = loss, dtype
            return torch.where(labels != IGNORE, each, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, log_sum = ctx.saved_tensors
        loss, dtype = ctx.loss, ctx.dtype
        h, place = hidden.to(dtype), loss.vocabulary.first(len(weight))
        scale = (labels != IGNORE) * grad
        by_hidden = torch.zeros_like(hidden, dtype=wide(dtype))
        by_weight = torch.empty_like(weight)
        rows = 0
        for w in weight.split(loss.columns):
            w = w.to(dtype)
            logits = h @ w.T
            g = loss.gradient(logits, labels - place, log_sum, scale, loss.soft_cap, loss.z_loss_coeff)
            del logits
            add_product(by_hidden, g, w)
            product(by_weight[rows : rows + len(w)], g.T, h)
            del g
            rows, place = rows + len(w), place + len(w)
        return by_hidden.to(hidden.dtype), by_weight, None, None, None


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``total += a @ b``, the product as wide as ``total``: nothing is rounded to the dtype of ``a`` and ``b``."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out = a @ b``, as wide as ``out``."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        add_product(out.zero_(), a, b)


def with_gradient(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Parts],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
) -> torch.Tensor:
    """The loss that ``run`` computes together with its gradients, as a function that autograd knows.

    Args:
        run: (hidden (T, dim), weight in the same dtype, labels (T,), whether gradients are wanted) -> the loss, its
            gradient by ``hidden``, its gradient by ``weight`` in any dtype.
        hidden: (B, S, dim).
        weight: (V, dim). Its gradient is rounded once, to its own dtype, whatever the dtype of compute.
        labels: int64 (B, S).
    """
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    hidden = hidden.flatten(0, 1)
    return _WithGradient.apply(hidden, weight, labels.flatten(), run, compute_dtype(hidden), wanted)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        run: Callable[..., Parts],
        dtype: torch.dtype,
        wanted: bool,
    ) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            loss, by_hidden, by_weight = run(hidden.to(dtype), weight.to(dtype), labels, wanted)
        if by_hidden is not None and by_weight is not None:
            ctx.save_for_backward(by_hidden, by_weight)
            ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Not in place: a schedule that takes gradients of inputs and of weights apart comes here twice.
        scaled = (
            torch.mul(x, grad, out=torch.empty_like(x, dtype=dtype))
            for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *scaled, None, None, None, None
