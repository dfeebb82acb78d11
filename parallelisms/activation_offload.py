"""Activations in CPU memory between a block's forward and backward passes.

What autograd saves of a block goes to pinned memory on a stream of its own while the next block computes, and comes
back while the block above is in its backward pass. At most two blocks' activations are then on the device: one in use,
one on its way.

torch's ``save_on_cpu`` copies on the computing stream, and a tensor as often as it is saved (the input of queries, keys
and values three times), weights included. Here a storage goes once a block, and what outlives the block stays: weights,
buffers, and inputs that all blocks share (rotary table, masks).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)

MINIMUM_BYTES = 2**20
"""Smaller tensors stay: a copy costs more than it frees."""


def apply_activation_offload(model: nn.Module, *, minimum_bytes: int | None = None) -> None:
    """Wrap the blocks under ``model.layers`` in place. Of one that is checkpointed only its inputs are left to move.

    Args:
        minimum_bytes: of a tensor's storage that moves. None: MINIMUM_BYTES.
    """
    layers = model.get_submodule("layers")
    activations = Activations(MINIMUM_BYTES if minimum_bytes is None else minimum_bytes)
    for i, (name, block) in enumerate(list(layers.named_children())):
        layers.register_module(name, _OffloadedBlock(block, activations, first=i == 0))
    logger.info("Applied activation offload: what blocks save waits in CPU memory")


class _OffloadedBlock(ActivationWrapper):
    def __init__(self, block: nn.Module, activations: Activations, *, first: bool):
        super().__init__(block)
        self.activations, self.first = activations, first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block = self._checkpoint_wrapped_module
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        inputs = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and not x.requires_grad)
        lasting = {_address(x) for x in (*inputs, *block.parameters(), *block.buffers()) if _plain(x)}
        with self.activations.of_block(lasting, first=self.first):
            return block(*args, **kwargs)


@dataclass(eq=False)
class _Storage:
    """A storage that a block saved."""

    host: torch.Tensor
    """uint8."""
    device: torch.device
    held: torch.Tensor | None
    """The same bytes on the device: the original until its copy is done, later what came back."""
    uses: int = 0
    """Saved tensors in it that the backward pass has not asked for."""


@dataclass(eq=False)
class _Frame:
    """What one block saved in one forward pass."""

    before: _Frame | None
    """Of the block whose backward pass comes next; None once it is on its way."""
    storages: list[_Storage] = field(default_factory=list)
    known: dict[tuple[int, int], int] = field(default_factory=dict)
    """(address, version) -> place in ``storages``. Addresses are unique while the originals are held."""
    moved: torch.cuda.Event | None = None
    """After the latest copies, whichever way."""


@dataclass(frozen=True)
class _Saved:
    """A saved tensor, as its place in a storage."""

    frame: _Frame
    index: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Activations:
    """What the blocks of a model, or of one pipeline stage, have saved. Used through :func:`apply_activation_offload`.

    Frames of a pass are chained, so that the backward pass of one brings back the one before it. Order and time of the
    backward passes are free all the same: what is not there when it is asked for is fetched.
    """

    def __init__(self, minimum_bytes: int):
        self._minimum = minimum_bytes
        self._latest: _Frame | None = None
        self._stream: torch.cuda.Stream | None = None
        self.sent_bytes = 0
        """Copied to CPU memory since the first block of the latest pass."""

    @contextlib.contextmanager
    def of_block(self, lasting: Collection[int], *, first: bool) -> Iterator[None]:
        """Within it, what autograd saves moves, except storages at the addresses ``lasting``."""
        frame = _Frame(before=None if first else self._latest)
        self.sent_bytes = 0 if first else self.sent_bytes

        def pack(x: torch.Tensor) -> torch.Tensor | _Saved:
            return self._send(frame, x) if self._moves(x, lasting) else x

        with torch.autograd.graph.saved_tensors_hooks(pack, self._fetched):
            yield
        # The block before had this one's time to get away. The last block's originals stay until another pass begins:
        # they are what the backward pass asks for first.
        if self._latest is not None:
            self._let_go(self._latest)
        self._latest = frame

    def _moves(self, x: torch.Tensor, lasting: Collection[int]) -> bool:
        if not _plain(x) or _is_weight(x) or x.untyped_storage().nbytes() < self._minimum:
            return False
        return _address(x) not in lasting

    def _send(self, frame: _Frame, x: torch.Tensor) -> _Saved:
        key = (_address(x), x._version)
        if key not in frame.known:
            held = torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())
            host = torch.empty(held.shape, dtype=torch.uint8, pin_memory=x.is_cuda)
            with self._beside(frame, x.device):
                host.copy_(held, non_blocking=True)
            frame.known[key] = len(frame.storages)
            frame.storages.append(_Storage(host, x.device, held))
            self.sent_bytes += host.numel()
        index = frame.known[key]
        frame.storages[index].uses += 1
        return _Saved(frame, index, x.dtype, x.shape, x.stride(), x.storage_offset())

    def _let_go(self, frame: _Frame) -> None:
        """Drop the originals. What computes next may be given their memory, so it waits for the copies."""
        if frame.moved is not None:
            torch.cuda.current_stream().wait_event(frame.moved)
        for storage in frame.storages:
            storage.held = None
        frame.known.clear()

    def _fetched(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        frame = saved.frame
        if frame is self._latest:
            self._latest = None  # its originals are used now and go one by one
        storage = frame.storages[saved.index]
        if storage.held is None:
            self._fetch(frame, [s for s in frame.storages if s.uses > 0 and s.held is None] or [storage])
        if frame.moved is not None:
            torch.cuda.current_stream(storage.device).wait_event(frame.moved)
        if frame.before is not None:
            self._fetch(frame.before, [s for s in frame.before.storages if s.held is None])
            frame.before = None
        assert storage.held is not None  # one of those fetched
        found = torch.empty(0, dtype=saved.dtype, device=storage.device)
        found.set_(storage.held.untyped_storage(), saved.offset, saved.size, saved.stride)
        storage.uses -= 1
        if storage.uses <= 0:
            storage.held = None
        return found

    def _fetch(self, frame: _Frame, storages: list[_Storage]) -> None:
        for storage in storages:  # memory of the computing stream: it is freed there after its last use
            storage.held = torch.empty(storage.host.shape, dtype=torch.uint8, device=storage.device)
        if storages:
            with self._beside(frame, storages[0].device):
                for storage in storages:
                    storage.held.copy_(storage.host, non_blocking=True)  # type: ignore[union-attr]

    @contextlib.contextmanager
    def _beside(self, frame: _Frame, device: torch.device) -> Iterator[None]:
        """Within it, copies run beside what computes, after all that was launched before. A CPU just copies."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
        frame.moved = self._stream.record_event()


def _plain(x: torch.Tensor) -> bool:
    """Whether ``x`` is nothing but its storage: no DTensor, no quantised subclass."""
    return type(x) in (torch.Tensor, nn.Parameter) and x.layout == torch.strided


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _is_weight(x: torch.Tensor) -> bool:
    """Whether ``x`` is a parameter or its cast, which autocast keeps until the pass ends; or a view of one."""
    whole = x if x._base is None else x._base
    if whole.is_leaf:
        return whole.requires_grad
    cast = whole.grad_fn
    return cast is not None and cast.name() == "ToCopyBackward0" and hasattr(cast.next_functions[0][0], "variable")
