"""A stage as torch.distributed.pipelining runs it, and the time it keeps its rank busy."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

Inputs = dict[str, torch.Tensor]
"""tokens, labels and what else the model takes, of one micro-batch. Every rank along ``pp`` has it."""
Compute = Callable[[nn.Module, Inputs, torch.Tensor | None], torch.Tensor]
"""(stage, inputs, hidden states from the stage before) -> hidden states, or the last stage's loss."""
Span = Callable[[str, str], AbstractContextManager[None]]
"""(name of a part of a step, detail) -> its context, in which profiles see it."""


class Stage(PipelineStage):
    """A stage that is given its micro-batches beforehand, so that hidden states alone travel.

    Positions, documents and labels are on every rank: as torch's keyword arguments they would be kept with each
    micro-batch's activations, and torch 2.11 would count them among the inputs that gradients are sent for. The last
    stage's output is the loss, a scalar, so no logits are kept. Shapes are given: inferring them would run each stage
    once more, which shows in counters.

    Args:
        module: the stage's modules; called through ``compute``.
        index: its place, of ``count``.
        hidden: a tensor on the meta device of the shape and dtype that stages exchange.
        loss_dtype: of the last stage's scalar.
        group: ranks along ``pp``.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        count: int,
        *,
        compute: Compute,
        hidden: torch.Tensor,
        loss_dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        busy: "BusyTime",
    ):
        scalar = torch.empty((), dtype=loss_dtype, device="meta", requires_grad=True)
        super().__init__(
            module,
            index,
            count,
            device,
            input_args=() if index == 0 else (hidden,),
            output_args=(scalar if index == count - 1 else hidden,),
            group=group,
        )
        self.compute, self.busy = compute, busy
        self.micro_batches: list[Inputs] = []
        self.current = 0
        self._graphs: dict[int, Any] = {}
        """Of micro-batches whose weights have no gradient yet: a node behind the output, and by it the whole graph.
        torch takes an output off its graph after the pass for inputs, and keeps the Python objects of nodes that the
        pass for weights begins at. In torch 2.11 such an object does not keep an autograd function of Python (grouped
        experts, a loss in parts) alive, and the pass fails."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The stage's part of the current micro-batch."""
        out = self.compute(self.submod, self.micro_batches[self.current], args[0] if args else None)
        self._graphs[self.current] = out.view_as(out).grad_fn
        return out

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Without messages of a V to itself, which gloo cannot send. torch 2.13 no longer asks."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forward pass of one micro-batch."""
        self.current = fwd_chunk_id
        with self.busy.measured("forward", self._label(fwd_chunk_id)):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        """Backward pass of one micro-batch, whole or for inputs alone."""
        with self.busy.measured("backward", self._label(bwd_chunk_id)):
            super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)
        if full_backward:
            del self._graphs[bwd_chunk_id]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Backward pass of one micro-batch for weights."""
        with self.busy.measured("backward", f"{self._label(bwd_chunk_id)} weights"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        del self._graphs[bwd_chunk_id]

    def _label(self, micro_batch: int) -> str:
        return f"stage {self.stage_index} micro-batch {micro_batch}"


class BusyTime:
    """How long a rank computes in a step, on the device's own clock."""

    def __init__(self, device: torch.device, span: Span):
        self.span = span
        self.cuda = device.type == "cuda"
        self.passes: list[tuple[Any, Any]] = []
        self.whole: tuple[Any, Any] | None = None

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000 if self.cuda else end - begin

    @contextmanager
    def measured(self, name: str, detail: str) -> Iterator[None]:
        """Around a pass of a stage, ``name``."""
        begin = self._now()
        with self.span(name, detail):
            yield
        self.passes.append((begin, self._now()))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the passes of a step."""
        self.passes.clear()
        begin = self._now()
        yield
        self.whole = begin, self._now()

    def read(self) -> tuple[float, float]:
        """(seconds in passes, seconds in all) of the latest step. Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        return sum(self._seconds(*p) for p in self.passes), self._seconds(*self.whole) if self.whole else 0.0
