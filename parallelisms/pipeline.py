"""Pipeline parallelism: micro-batches go through stages on several ranks, in the order that a schedule sets.

The schedules are torch.distributed.pipelining's. The loss of each micro-batch is its sum over the *global batch's*
count of valid tokens, so gradients add up and nothing is scaled afterwards (torchtitan #2972).
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from parallelisms.mesh import Mesh, on_this_rank
from parallelisms.pipeline_split import Stages
from parallelisms.pipeline_stage import BusyTime, Inputs, Span, Stage

logger = logging.getLogger(__name__)


class Pipeline:
    """Passes of a model whose layers are spread along ``pp`` (trainer/passes.py says what a method must do).

    Args:
        model: this rank's stages.
        mesh: with ``pp`` above 1.
        ranks: the rank along ``pp`` of each stage.
        schedule: torch's name of it, or "naive": each local batch goes through alone, as one micro-batch.
        hidden: a tensor on the meta device of the shape (micro-batch, sequence, dim) and dtype that stages exchange.
        precision: makes the context of a forward pass.
        span: (name, detail) -> the context of a part of a step, for profiles.
    """

    def __init__(
        self,
        model: Stages,
        mesh: Mesh,
        *,
        ranks: list[int],
        schedule: str,
        hidden: torch.Tensor,
        precision: Callable[[], AbstractContextManager[None]],
        device: torch.device,
        span: Span,
    ):
        assert mesh.device_mesh is not None
        self.model, self.mesh, self.ranks, self.device = model, mesh, ranks, device
        self.name, self.hidden = schedule, hidden
        self.precision = precision
        self.group = mesh.device_mesh["pp"].get_group()
        self.rank = self.group.rank()
        self.busy, self.span = BusyTime(device, span), span
        self.schedules: dict[int, Any] = {}
        self.stages: list[Stage] = []
        self.valid_tokens = 1
        self.total = torch.zeros((), device=device)

    def forward(self, inputs: Inputs) -> torch.Tensor | None:
        """Summed loss of one micro-batch of any size; None but on the rank of the last stage.

        A rank is done with a micro-batch once it has sent it on, so several in a row fill the pipeline by themselves.
        """
        x: torch.Tensor | None = None
        stages = dict(self.model.items())
        for index, rank in enumerate(self.ranks):
            if rank != self.rank:
                continue
            if index and self.ranks[index - 1] != rank:
                x = torch.empty(
                    len(inputs["tokens"]), *self.hidden.shape[1:], dtype=self.hidden.dtype, device=self.device
                )
                dist.recv(x, group=self.group, group_src=self.ranks[index - 1])
            last = index + 1 == len(self.ranks)
            x = self._run(stages[index], inputs, x, inputs["labels"] if last else None)
            if index + 1 < len(self.ranks) and self.ranks[index + 1] != rank:
                dist.send(x.contiguous(), group=self.group, group_dst=self.ranks[index + 1])
        return x if self.ranks[-1] == self.rank else None

    def forward_backward(self, micro_batches: Sequence[Inputs], valid_tokens: int) -> torch.Tensor:
        """Run the schedule over all micro-batches of a step, then reduce gradients that nothing else reduces."""
        self.valid_tokens = valid_tokens
        self.total = torch.zeros((), device=self.device)
        pieces = [piece for inputs in micro_batches for piece in _cut(inputs, len(self.hidden))]
        rounds = [[piece] for piece in pieces] if self.name == "naive" else [pieces]
        with self.busy.step():
            for together in rounds:
                schedule = self._schedule(len(together))
                for stage in self.stages:
                    stage.micro_batches = together
                # The loss is the last stage's output; torch asks for a target of each micro-batch all the same.
                schedule.step(target=torch.zeros(len(together)), return_outputs=False)
                for stage in self.stages:
                    stage.micro_batches = []
        with self.span("backward", "sums over ranks"):
            self._sum_over_replicas()
            self._sum_tied()
        return self.total

    def report(self) -> dict[str, float]:
        """``pipeline/bubble(%)``: the measured share of the latest step in which ranks waited, their mean."""
        busy, whole = self.mesh.sum_over_data(
            torch.tensor(self.busy.read(), dtype=torch.float64, device=self.device)
        ).tolist()
        return {"pipeline/bubble(%)": 100 * (1 - busy / whole)} if whole else {}

    def _run(
        self, stage: nn.Module, inputs: Inputs, hidden: torch.Tensor | None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states; of the last stage, given ``labels``, their summed loss."""
        with self.precision():
            return stage(**inputs | {"hidden": hidden, "labels": labels})

    def _last(self, stage: nn.Module, inputs: Inputs, hidden: torch.Tensor | None) -> torch.Tensor:
        loss_sum = self._run(stage, inputs, hidden, inputs["labels"])
        self.total += loss_sum.detach()
        return loss_sum / self.valid_tokens

    def _schedule(self, n: int) -> Any:
        """The schedule for ``n`` micro-batches; every step has the same number."""
        if n not in self.schedules:
            self.stages = [self._stage(index, module) for index, module in self.model.items()]
            kind = get_schedule_class("GPipe" if self.name == "naive" else self.name)
            single = issubclass(kind, PipelineScheduleSingle)
            self.schedules = {
                n: kind(
                    self.stages[0] if single else self.stages,  # type: ignore[arg-type]
                    n_microbatches=n,
                    loss_fn=lambda loss, _: loss,
                    scale_grads=False,
                )
            }
            logger.info("Pipeline of %d stages, %s, %d micro-batches a step", len(self.ranks), self.name, n)
        return self.schedules[n]

    def _stage(self, index: int, module: nn.Module) -> Stage:
        count = len(self.ranks)
        return Stage(
            module,
            index,
            count,
            compute=self._last if index == count - 1 else self._run,
            hidden=self.hidden,
            loss_dtype=torch.promote_types(self.hidden.dtype, torch.float32),
            device=self.device,
            group=self.group,
            busy=self.busy,
        )

    def _sum_over_replicas(self) -> None:
        """Sum gradients over whole copies of the stages (DDP). Not in buckets during the backward passes: schedules
        that split these do not run the hooks that DDP waits for.
        """
        mesh = self.mesh
        if mesh.sharded or not mesh.replicated or mesh.device_mesh is None:
            return
        group = mesh.device_mesh["dp_replicate"].get_group()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        works = [dist.all_reduce(on_this_rank(g), group=group, async_op=True) for g in gradients]
        for work in works:
            work.wait()

    def _sum_tied(self) -> None:
        """Give embedding and head, one matrix on two stages, the sum of their gradients."""
        if not self.model.tied:
            return
        mine = [on_this_rank(p.grad) for p in (*self.model.originals(), *self.model.copies()) if p.grad is not None]
        first, last = self.ranks[0], self.ranks[-1]
        if first == last and self.rank == first:
            mine[0].add_(mine[1])
            mine[1].copy_(mine[0])
        elif self.rank in (first, last):
            other, peer = torch.empty_like(mine[0]), last if self.rank == first else first
            send = dist.P2POp(dist.isend, mine[0], group=self.group, group_peer=peer)
            receive = dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            mine[0].add_(other)


def _cut(inputs: Inputs, size: int) -> list[Inputs]:
    """``inputs`` in micro-batches of ``size`` sequences."""
    pieces = {name: x.split(size) for name, x in inputs.items()}
    return [dict(zip(pieces, values, strict=True)) for values in zip(*pieces.values(), strict=True)]
