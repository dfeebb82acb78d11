"""torch.compile, a Transformer block at a time: all blocks share one compiled graph, so compile time does not grow
with depth.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)


def apply_compile(model: nn.Module, *, backend: str, inside_wrapper: bool = False, memory_budget: float = 1.0) -> None:
    """Compile every block under ``model.layers`` in place, as one graph without breaks; one with experts may break, as
    FSDP2 gathers its router inside of it.

    Args:
        backend: of torch.compile.
        inside_wrapper: leave a block's wrapper outside of the graph. With checkpointing there, a block is run twice
            instead of its graph recomputing: of a tensor-parallel block torch 2.13 cannot compile it as well.
            Activation offload moves what a graph saves, not what its operators do.
        memory_budget: share of the activations, of what a graph would save for speed alone, that it may save; 0:
            its inputs. What is recomputed for it costs the fewest FLOPs (torch's min-cut partitioner).
    """
    torch._functorch.config.activation_memory_budget = memory_budget  # read at each compilation of this process
    for block in model.get_submodule("layers").children():
        if inside_wrapper:
            block = getattr(block, "_checkpoint_wrapped_module", block)
        block.compile(backend=backend, fullgraph=not hasattr(block, "moe"))
    budget = "" if memory_budget == 1.0 else f", memory budget {memory_budget:g}"
    logger.info("Compiling each Transformer block with torch.compile (%s)%s", backend, budget)


Function = Callable[..., Any]


def apply_compile_loss(model: nn.Module, *, backend: str, backward_twice: bool = False) -> None:
    """Compile the loss of ``model.output`` in place, as the loss itself says what of it; see :func:`compile_loss`."""
    if getattr(model, "output", None) is None:
        return
    model.output.loss.compile(functools.partial(compile_loss, backend=backend, backward_twice=backward_twice))
    logger.info("Compiling the loss with torch.compile (%s)", backend)


def compile_loss(loss: Function, *, backend: str, backward_twice: bool = False) -> Function:
    """``loss``, or a part of one, compiled.

    Args:
        backend: of torch.compile.
        backward_twice: a schedule that takes gradients of inputs and of weights apart runs the loss's backward pass
            with its graph kept. torch gives a compiled graph's buffers away in its first backward pass unless it is
            told not to, and then stops.
    """
    if not backward_twice:
        return torch.compile(loss, backend=backend)
    torch._functorch.config.donated_buffer = False  # read at each compilation and in each backward pass

    def with_graph_kept(*arguments: Any) -> Any:
        return loss(*arguments)  # code of its own: torch keeps one compiled graph for the same code in a process

    return torch.compile(with_graph_kept, backend=backend)
