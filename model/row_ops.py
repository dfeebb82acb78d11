"""The row functions of experts as operators: what compilation and checkpointing see is one node without side effects.

On a CPU an operator is the readable function of model/row_reference.py. On CUDA it is the Triton kernel of
model/row_kernels.py, or the readable function compiled by inductor: see :func:`choose_row_kernels`. Ranks that exchange
tokens (parallelisms/token_exchange.py) use the same operators, by name.
"""

import functools
import importlib.util
import logging
from types import ModuleType
from typing import Any

import torch

from config.errors import ConfigError
from model import row_reference
from model.fusion import fused
from model.grouped_products import grouped_mm

logger = logging.getLogger(__name__)

NAMESPACE = "ablation_trainer"
operator = functools.partial(torch.library.custom_op, mutates_args=())
_choice = "auto"


def choose_row_kernels(name: str, device: str) -> None:
    """Set ``moe.row_kernels`` for this process and say what it stands for here.

    Args:
        name: "auto": triton where there is CUDA and Triton. "triton", "torch".
        device: "cpu" or "cuda".

    Raises:
        ConfigError: Triton is asked for and cannot run.
    """
    global _choice
    there = _triton_is_there()
    if name == "triton" and not (there and device == "cuda"):
        reason = "Triton is not installed" if device == "cuda" else f"its kernels run on CUDA, this device is {device}"
        raise ConfigError(f'moe.row_kernels = "triton": {reason}. Set moe.row_kernels = "auto".')
    _choice = name if name != "auto" or there else "torch"
    if device == "cuda":
        plain = "compiled torch" if there else "torch, not compiled: slowly, as Triton is not installed"
        logger.info("moe.row_kernels: rows move by %s", plain if _choice == "torch" else "Triton kernels")


def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernels(x: torch.Tensor) -> ModuleType:
    """Where the functions for ``x``, which is on CUDA, are."""
    if _choice == "torch" or x.dtype == torch.float64:  # the kernels add in float32
        return _compiled()
    from model import row_kernels

    return row_kernels


@functools.cache
def _compiled() -> Any:
    names = ("gather_sum", "swiglu", "swiglu_backward")
    found = ModuleType("compiled row_reference")
    for name in names:
        plain = getattr(row_reference, name)
        setattr(found, name, fused(plain) if _triton_is_there() else plain)  # inductor needs Triton on CUDA as well
    found.gather_rows = torch.Tensor.__getitem__  # type: ignore[attr-defined]
    found.zero_empty_ = row_reference.zero_empty_  # type: ignore[attr-defined]
    return found


@operator(f"{NAMESPACE}::gather_rows")
def gather_rows(x: torch.Tensor, token: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """(T, D) -> (R, D): each row's token. The backward pass sums a token's rows, by a gather.

    Args:
        token, row: int64 (R,) and (T, slots), as :class:`model.permute.Plan` has them.
    """
    return x[token]


@gather_rows.register_kernel("cuda")
def _(x: torch.Tensor, token: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return _kernels(x).gather_rows(x, token)


@gather_rows.register_fake
def _(x: torch.Tensor, token: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return x.new_empty(token.shape[0], x.shape[1])


def _keep_index(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _differentiate_gather(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    token, row = ctx.saved_tensors
    return gather_sum(grad, token, row), None, None


gather_rows.register_autograd(_differentiate_gather, setup_context=_keep_index)


@operator(f"{NAMESPACE}::gather_sum")
def gather_sum(rows: torch.Tensor, token: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """(R, D) -> (T, D): the sum of each token's rows (:func:`model.row_reference.gather_sum`).

    The backward pass gathers the token of each row: right for rows that an assignment names.
    """
    return row_reference.gather_sum(rows, row)


@gather_sum.register_kernel("cuda")
def _(rows: torch.Tensor, token: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return _kernels(rows).gather_sum(rows, row)


@gather_sum.register_fake
def _(rows: torch.Tensor, token: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(row.shape[0], rows.shape[1])


def _differentiate_sum(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return gather_rows(grad, *ctx.saved_tensors), None, None


gather_sum.register_autograd(_differentiate_sum, setup_context=_keep_index)


@operator(f"{NAMESPACE}::combine")
def combine(rows: torch.Tensor, weights: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """(R, D), (T, slots) -> (T, D): each token's weighted sum (:func:`model.row_reference.gather_sum`).

    Without a backward pass of its own: experts differentiate their whole network at once, and keep no results
    (model/experts_grouped.py).
    """
    return row_reference.gather_sum(rows, row, weights)


@combine.register_kernel("cuda")
def _(rows: torch.Tensor, weights: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return _kernels(rows).gather_sum(rows, row, weights)


@combine.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(row.shape[0], rows.shape[1])


@operator(f"{NAMESPACE}::expert_swiglu")
def swiglu(h: torch.Tensor) -> torch.Tensor:
    """:func:`model.row_reference.swiglu`, without a backward pass of its own."""
    return row_reference.swiglu(h.contiguous())  # results lie in memory as compilers are told


@swiglu.register_kernel("cuda")
def _(h: torch.Tensor) -> torch.Tensor:
    return _kernels(h).swiglu(h.contiguous())


@swiglu.register_fake
def _(h: torch.Tensor) -> torch.Tensor:
    return h.new_empty(h.shape[0], h.shape[1] // 2)


@operator(f"{NAMESPACE}::expert_swiglu_backward")
def swiglu_backward(
    h: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`model.row_reference.swiglu_backward`."""
    return row_reference.swiglu_backward(h.contiguous(), grad.contiguous(), weights.contiguous(), slot, ends)


@swiglu_backward.register_kernel("cuda")
def _(
    h: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _kernels(h).swiglu_backward(h.contiguous(), grad.contiguous(), weights.contiguous(), slot, ends)


@swiglu_backward.register_fake
def _(
    h: torch.Tensor, grad: torch.Tensor, weights: torch.Tensor, slot: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return h.new_empty(h.shape), h.new_empty(grad.shape), weights.new_empty(weights.shape)


@torch.library.custom_op(f"{NAMESPACE}::zero_empty", mutates_args=("gradient",))
def zero_empty_(gradient: torch.Tensor, ends: torch.Tensor) -> None:
    """:func:`model.row_reference.zero_empty_`."""
    row_reference.zero_empty_(gradient, ends)


@zero_empty_.register_kernel("cuda")
def _(gradient: torch.Tensor, ends: torch.Tensor) -> None:
    _kernels(gradient).zero_empty_(gradient, ends)


@zero_empty_.register_fake
def _(gradient: torch.Tensor, ends: torch.Tensor) -> None:
    return None


@operator(f"{NAMESPACE}::expert_weight_gradient")
def weight_gradient(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """(R, M), (R, N) -> (E, M, N): a[rows of e]^T @ b[rows of e], exactly zero for experts without rows."""
    return row_reference.zero_empty_(grouped_mm(a.t(), b, ends), ends)


@weight_gradient.register_kernel("cuda")
def _(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return _kernels(a).zero_empty_(grouped_mm(a.t(), b, ends), ends)


@weight_gradient.register_fake
def _(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])
