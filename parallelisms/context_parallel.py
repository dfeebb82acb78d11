"""Context parallelism: ranks share each sequence. All but attention works on tokens one by one and needs nothing.

Attention is reached through its seam: the backend of the model is wrapped in one that knows of the other ranks and uses
the wrapped one's kernel, block by block (ring, all-gather) or on whole sequences (Ulysses).
"""

import logging
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from config.errors import ConfigError
from parallelisms.allgather_attention import allgather_attention
from parallelisms.block_attention import KERNELS, BlockKernel
from parallelisms.context_layout import Layout
from parallelisms.ring_attention import ring_attention
from parallelisms.ulysses_attention import heads_for_sequence, sequence_for_heads

logger = logging.getLogger(__name__)

_OPERATORS = {"ring": ring_attention, "allgather": allgather_attention}


class Backend(Protocol):
    """What is used of an attention backend (model/attention.py)."""

    name: str
    blocks: BlockKernel | None

    def prepare(
        self, document_ids: torch.Tensor | None, document_starts: torch.Tensor | None, tokens: torch.Tensor | None
    ) -> Any: ...

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor: ...


class Blockwise:
    """Ring or all-gather attention with the block kernel of ``backend``."""

    blocks = None

    def __init__(self, backend: Backend, method: str, layout: Layout, group: dist.ProcessGroup):
        if backend.blocks is None:
            raise ConfigError(f'attention.backend = "{backend.name}" cannot attend block by block, as {method} does')
        KERNELS[backend.name] = backend.blocks
        self.name, self.attend = backend.name, _OPERATORS[method]
        self.plain = (True, layout.name, backend.name, group.group_name)

    def prepare(
        self,
        document_ids: torch.Tensor | None,
        document_starts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Whole ``document_ids`` (B, S); each block makes its own mask of them."""
        return document_ids

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out, _ = self.attend(q, k, v, mask, *self.plain)
        return out


class Ulysses:
    """``backend`` on whole sequences of a share of the heads."""

    blocks = None

    def __init__(self, backend: Backend, group: dist.ProcessGroup):
        self.name, self.backend, self.group = backend.name, backend, group

    def prepare(
        self,
        document_ids: torch.Tensor | None,
        document_starts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> Any:
        """What the wrapped kernel wants to know of whole documents; ``tokens`` (B, S / n) stand for their shape."""
        whole = None if tokens is None else tokens.repeat(1, self.group.size())
        return self.backend.prepare(document_ids, document_starts, whole)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        return sequence_for_heads(self.backend(*heads_for_sequence(q, k, v, self.group), mask), self.group)


def apply_context_parallel(model: nn.Module, mesh: DeviceMesh, *, method: str, layout: Layout) -> None:
    """Let the attention of ``model`` reach the keys of all ranks of the one-dimensional ``mesh``, in place.

    Args:
        model: ``backend`` and ``layers`` with ``attention.backend``; it is called with the part of each sequence that
            ``layout`` gives the rank, and with whole document ids (:meth:`Layout.part`).
        method: "ring", "allgather" or "ulysses". Ulysses needs the contiguous layout.
    """
    group = mesh.get_group()
    backend: Any = model.backend
    wrapped = Ulysses(backend, group) if method == "ulysses" else Blockwise(backend, method, layout, group)
    model.backend = wrapped  # type: ignore[assignment]  # not a module
    for block in model.get_submodule("layers").children():
        block.attention.backend = wrapped
    logger.info("Applied context parallelism over %d ranks: %s, %s pieces", mesh.size(), method, layout.name)
