"""torch.compile, a Transformer block at a time: all blocks share one compiled graph, so compile time does not grow
with depth.
"""

import logging
from collections.abc import Callable

import torch
from torch import nn

logger = logging.getLogger(__name__)


def apply_compile(model: nn.Module, *, backend: str, inside_checkpoint: bool = False) -> None:
    """Compile every block under ``model.layers`` in place, as one graph without breaks; one with experts may break, as
    FSDP2 gathers its router inside of it.

    Args:
        backend: of torch.compile.
        inside_checkpoint: leave activation checkpointing outside of the graph: a block is run twice instead of its
            graph recomputing. Of a tensor-parallel block torch 2.13 cannot compile the checkpointing as well.
    """
    for block in model.get_submodule("layers").children():
        if inside_checkpoint:
            block = getattr(block, "_checkpoint_wrapped_module", block)
        block.compile(backend=backend, fullgraph=not hasattr(block, "moe"))
    logger.info("Compiling each Transformer block with torch.compile (%s)", backend)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits, labels) -> a scalar."""


def compile_loss(loss: Loss, *, backend: str, backward_twice: bool = False) -> Loss:
    """``loss``, compiled.

    Args:
        backend: of torch.compile.
        backward_twice: a schedule that takes gradients of inputs and of weights apart runs the loss's backward pass
            with its graph kept. torch gives a compiled graph's buffers away in its first backward pass unless it is
            told not to, and then stops.
    """
    if not backward_twice:
        return torch.compile(loss, backend=backend)
    torch._functorch.config.donated_buffer = False  # read at each compilation and in each backward pass

    def with_graph_kept(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return loss(logits, labels)  # code of its own: torch keeps one compiled graph for the same code in a process

    return torch.compile(with_graph_kept, backend=backend)
