"""torch.compile, a Transformer block at a time: all blocks share one compiled graph, so compile time does not grow
with depth.
"""

import logging

from torch import nn

logger = logging.getLogger(__name__)


def apply_compile(model: nn.Module, *, backend: str) -> None:
    """Compile every block under ``model.layers`` in place, as one graph without breaks."""
    for block in model.get_submodule("layers").children():
        block.compile(backend=backend, fullgraph=True)
    logger.info("Compiling each Transformer block with torch.compile (%s)", backend)
