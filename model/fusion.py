"""Element-wise chains as one kernel on an accelerator."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, compiled when its first argument is on CUDA and nothing is being compiled around it.

    Eager, a chain such as SwiGLU or a gather with a sum writes every intermediate result to memory; compiled, it is
    one pass. On CPU the function runs as it is written, and inside an outer torch.compile it is traced like any other.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:  # at the first call: torch.compile imports Inductor, two seconds of CPU time
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(first: torch.Tensor, *rest: Any) -> Any:
        if first.is_cuda and not torch.compiler.is_compiling():
            return compiled()(first, *rest)
        return function(first, *rest)

    return call
