"""What a training step does for a model's experts, around its micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from config.schema import Moe
from config.shapes import ModelShape
from model.balance import AllReduce, balances
from model.load_statistics import RoutingProbe, moe_metrics
from model.moe import begin_step, sum_global_counts, token_numbers, update_balance


class ExpertStep:
    """Coefficients before a step, counts during it, one update after it.

    Args:
        model: whole, or this rank's pipeline stages, which need not hold a MoE layer.
        moe: the [moe] section.
        shape: of the whole model; it has experts.
        total_steps: of the run, for schedules.
        data_ranks: ranks that read different sequences.
        sum_over_batch: sums over the ranks that hold different tokens and the same layers.
        sum_over_stages: sums over the ranks that hold other layers and the same tokens.
        context_ranks: ranks that share each sequence, and so each balance group.
        sum_over_context: sums over them.
        expert_ranks: ranks that hold different experts.
    """

    def __init__(
        self,
        model: nn.Module,
        moe: Moe,
        shape: ModelShape,
        *,
        total_steps: int,
        data_ranks: int,
        sum_over_batch: AllReduce,
        sum_over_stages: AllReduce = lambda x: x,
        context_ranks: int = 1,
        sum_over_context: AllReduce = lambda x: x,
        expert_ranks: int = 1,
    ):
        assert shape.moe is not None
        self.model, self.moe, self.total_steps, self.data_ranks = model, moe, total_steps, data_ranks
        self.sum_over_batch, self.sum_over_stages = sum_over_batch, sum_over_stages
        self.layers = [i for i in range(shape.n_layers) if shape.moe.has_experts(i)]
        self.num_experts, self.expert_ranks = shape.moe.num_experts, expert_ranks
        self.loads = torch.zeros(len(self.layers), self.num_experts, dtype=torch.int64)
        """int64 (layers, E) of the whole model, dense layers left out: assignments of the step last reported."""
        self.probe: RoutingProbe | None = None
        self.exact = moe.balance == "global_aux_loss" and moe.f_source == "exact"
        for balance in balances(model).values():
            if data_ranks * context_ranks > 1:
                balance.reduce_running = sum_over_batch
            if context_ranks > 1:
                balance.reduce_group, balance.group_ranks = sum_over_context, context_ranks

    def report(self, micro_batch: Any, forward: Callable[[Any], object]) -> dict[str, float]:
        """Tags of a log step (:func:`model.load_statistics.moe_metrics`, and the churn). Every rank calls it, and has
        them for all layers of the model.

        The first ``micro_batch`` it is given is the fixed batch that churn is measured on. ``forward`` runs one through
        all layers. Waits for the device.
        """
        if self.probe is None:
            self.probe = RoutingProbe(self.model, lambda: forward(micro_batch))
        self.loads = self.all_loads()
        measured = self.sum_over_stages(self.sum_over_batch(self._of_all_layers("measured", 5, torch.float32)))
        for balance in balances(self.model).values():
            balance.measured.zero_()
        values = moe_metrics(
            self.loads,
            measured.cpu(),
            self.layers,
            capacity=self.moe.capacity != "none",
            per_layer=self.moe.log_per_layer,
            expert_ranks=self.expert_ranks,
        )
        return values | self.probe.churn(lambda x: self.sum_over_stages(self.sum_over_batch(x)))

    def all_loads(self) -> torch.Tensor:
        """int64 (layers, E) on the CPU: assignments of the latest step in each layer of the model, over all ranks.

        Every rank calls it.
        """
        return self.sum_over_stages(self._of_all_layers("load", self.num_experts, torch.int64)).cpu()

    def _of_all_layers(self, buffer: str, width: int, dtype: torch.dtype) -> torch.Tensor:
        """(layers of the whole model, width): ``buffer`` of each layer on this rank, zero for those elsewhere."""
        rows = torch.zeros(len(self.layers), width, dtype=dtype, device=next(self.model.parameters()).device)
        for balance in balances(self.model).values():
            rows[self.layers.index(balance.layer)] = getattr(balance, buffer)
        return rows

    def numbers(self, labels: torch.Tensor, sample_ids: list[int]) -> torch.Tensor:
        """The tokens of a micro-batch, numbered as :func:`model.moe.token_numbers` does."""
        return token_numbers(labels, sample_ids)

    def begin(self, step: int, micro_batches: Sequence[Any], route: Callable[[Any], None]) -> None:
        """Before the first micro-batch. ``route`` counts one micro-batch without training on it."""
        groups = len(micro_batches) * self.data_ranks
        begin_step(self.model, step, total_steps=self.total_steps, balance_groups=groups)
        if self.exact:
            for micro_batch in micro_batches:
                route(micro_batch)
            sum_global_counts(self.model, self.sum_over_batch)

    def end(self, step: int) -> None:
        """After the optimizer's step."""
        update_balance(self.model, step, self.sum_over_batch)

    def drop(self) -> None:
        """Forget a step that was not taken."""
        for balance in balances(self.model).values():
            balance.clear()
