"""torch.compile, a Transformer block at a time: all blocks share one compiled graph, so compile time does not grow
with depth.
"""

import logging

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
