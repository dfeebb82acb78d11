"""What a training step does for a model's experts, around its micro-batches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from config.schema import Moe
from model.balance import AllReduce, balances
from model.decoder import Decoder
from model.load_statistics import RoutingProbe, moe_metrics
from model.moe import begin_step, sum_global_counts, token_numbers, update_balance


class ExpertStep:
    """Coefficients before a step, counts during it, one update after it.

    Args:
        model: with at least one MoE layer.
        moe: the [moe] section.
        total_steps: of the run, for schedules.
        data_ranks: ranks that hold different tokens.
        all_reduce: sums over them.
    """

    def __init__(self, model: Decoder, moe: Moe, *, total_steps: int, data_ranks: int, all_reduce: AllReduce):
        self.model, self.total_steps, self.data_ranks, self.all_reduce = model, total_steps, data_ranks, all_reduce
        self.moe = moe
        self.probe: RoutingProbe | None = None
        self.exact = moe.balance == "global_aux_loss" and moe.f_source == "exact"
        if data_ranks > 1:
            for balance in balances(model).values():
                balance.reduce_running = all_reduce

    def report(self, micro_batch: Any, precision: Callable[[], AbstractContextManager[None]]) -> dict[str, float]:
        """Tags of a log step (:func:`model.load_statistics.moe_metrics`, and the churn). Every rank calls it.

        The first ``micro_batch`` it is given is the fixed batch that churn is measured on.
        """
        if self.probe is None:
            self.probe = RoutingProbe(self.model, micro_batch.tokens.to(self.model.rope.device), precision)
        values = moe_metrics(self.model, self.all_reduce, per_layer=self.moe.log_per_layer)
        return values | self.probe.churn(self.all_reduce, self.data_ranks)

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
            sum_global_counts(self.model, self.all_reduce)

    def end(self, step: int) -> None:
        """After the optimizer's step."""
        update_balance(self.model, step, self.all_reduce)

    def drop(self) -> None:
        """Forget a step that was not taken."""
        for balance in balances(self.model).values():
            balance.clear()
