"""A mixture-of-experts layer, and the seam through which its tokens travel.

``MoE`` routes; a *dispatcher* brings tokens to experts and results back. The local one calls the experts where the
tokens are; ``parallelisms/`` replaces it by one that sends them to other ranks first. Nothing else of the layer knows
where experts live.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from config.schema import Moe
from config.shapes import ModelShape
from model.balance import AllReduce, Balance, Observation, balances
from model.balance_losses import inject_loss
from model.experts import Experts
from model.feed_forward import FeedForward
from model.loss import IGNORE
from model.router import Router

Run = Callable[..., Any]
"""(x, experts, weights, max_rows) -> (T, dim), or (x, serve=...): :meth:`model.experts.Experts.forward` of the rank."""


class Dispatcher(Protocol):
    """Brings each token to its experts and the weighted sum of their results back."""

    def __call__(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        max_rows: int | None,
        run: Run,
        beside: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One layer's exchange.

        A rank may receive any number of tokens, none included, each with the slots meant for it: one if a token is
        sent once an expert, all that live there if it is sent once a rank (other slots hold the id "nowhere"). Its
        kernel gets them with local expert ids, or the numbers of rows if they are sorted, and the weights that
        travelled along, so a router's gradient comes back the way its weights went. ``run`` is called once, however
        many parts they come in.

        Args:
            x: (T, dim) of this rank.
            experts: int64 (T, slots), global expert ids; E means nowhere.
            weights: float32 (T, slots).
            max_rows: at most so many assignments go somewhere; None: all may.
            run: the experts that live here.
            beside: computes what does not need them, the shared experts, at a time that the dispatcher chooses.

        Returns:
            (T, dim), summed over each token's experts, and what ``beside`` gave.
        """


class LocalDispatcher:
    """All experts are here."""

    def __call__(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        max_rows: int | None,
        run: Run,
        beside: Callable[[], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = run(x, experts, weights, max_rows)
        return out, None if beside is None else beside()


class MoE(nn.Module):
    """Router, routed experts and, if the shape has them, shared experts that see every token.

    Args:
        shape: the model's shape; ``shape.moe`` is not None.
        moe: the [moe] section.
        noise_seed: of routing noise.
        layer: global index of the block.
    """

    def __init__(self, shape: ModelShape, moe: Moe, noise_seed: int, layer: int):
        super().__init__()
        assert shape.moe is not None
        self.router = Router(shape.dim, shape.moe, moe)
        self.experts = Experts(shape.moe.num_experts, shape.dim, shape.moe.hidden_dim, moe)
        self.shared_experts = FeedForward(shape.dim, shape.moe.shared_dim) if shape.moe.shared_dim else None
        self.balance = Balance(shape.moe, moe, noise_seed, layer)
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(
        self, x: torch.Tensor, numbers: torch.Tensor | None = None, seen: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Observation]:
        """(B, S, dim) -> (B, S, dim), and what there is to count.

        Args:
            x: input, normalised.
            numbers: int64 (B, S): each token's number in the whole of training, or -1 - number for one that takes no
                part in balance (padding). None: 0, 1, 2, ...
            seen: int64 (E,), what this step counted before.
        """
        tokens = x.flatten(0, 1)
        if numbers is None:
            numbers = torch.arange(len(tokens), device=x.device).view(x.shape[:2])
        valid, number = numbers >= 0, torch.where(numbers >= 0, numbers, -1 - numbers).flatten()
        balance = self.balance
        routing = self.router(
            tokens,
            number,
            valid.flatten(),
            balance.noise_key,
            balance.coefficients[2],
            balance.bias,
            balance.choose_by,
        )
        loss, observation = balance.observe(routing, valid, seen)
        weights = routing.weights if loss is None else inject_loss(routing.weights, loss)
        beside: Callable[[], torch.Tensor] | None = None
        if self.shared_experts is not None:
            beside = functools.partial(self.shared_experts, x)  # type: ignore[misc]  # mypy's view of partial
        out, shared = self.dispatcher(
            tokens, routing.experts, weights, self.router.max_rows(len(tokens)), self.experts, beside
        )
        out = out.view_as(x).to(x.dtype)
        return (out if shared is None else out + shared), observation


def token_numbers(labels: torch.Tensor, sample_ids: list[int]) -> torch.Tensor:
    """The ``numbers`` of a micro-batch: sample x S + position, the same on every mesh; negative where there is no
    label.

    Args:
        labels: int64 (B, S); ``IGNORE`` marks tokens that take no part in balance, as they take none in the loss.
        sample_ids: of the B sequences, counted since the start of training.

    Returns:
        int64 (B, S).
    """
    first = torch.tensor(sample_ids).clamp(min=0)[:, None] * labels.shape[1]
    numbers = (first + torch.arange(labels.shape[1])).to(labels.device)
    return torch.where(labels == IGNORE, -1 - numbers, numbers)


def begin_step(model: nn.Module, step: int, *, total_steps: int, balance_groups: int) -> None:
    """Set every layer's coefficients for ``step`` (from 1). ``balance_groups``: micro-batches of the step over all
    ranks.
    """
    for balance in balances(model).values():
        balance.set_step(step, total_steps=total_steps, balance_groups=balance_groups)


def update_balance(model: nn.Module, step: int, all_reduce: AllReduce = lambda x: x) -> None:
    """Act on the step's loads, once, after the optimizer's step.

    Args:
        all_reduce: sums over the ranks that hold different tokens. One call for the counts of all layers; the quantile
            rule adds one or a few a layer.
    """
    found = list(balances(model).values())
    if found:
        counts = all_reduce(torch.stack([b.counts for b in found]))
        for balance, mine in zip(found, counts, strict=True):
            balance.update(step, mine, all_reduce)


def sum_global_counts(model: nn.Module, all_reduce: AllReduce) -> None:
    """Sum what :meth:`model.decoder.Decoder.count_global` counted over the ranks that hold different tokens."""
    for balance in balances(model).values():
        balance.global_counts.copy_(all_reduce(balance.global_counts))
