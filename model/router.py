"""Which experts a token goes to, and with which weights.

The router is a linear map to one logit an expert, a score function, and a top-k. A balancing bias enters the *choice*
of experts only; weights are always the scores themselves.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from config.schema import Moe
from config.shapes import MoEShape
from model.noise import gumbel, normal, uniform

_JITTER, _GUMBEL, _RANDOM, _SKEW = 1, 2, 3, 4  # purposes of noise


class Routing(NamedTuple):
    """The router's answer for T tokens."""

    experts: torch.Tensor
    """int64 (T, slots), ids in 0 .. E - 1; E means nowhere (dropped, or a slot that is not used)."""
    weights: torch.Tensor
    """float32 (T, slots), 0 where ``experts`` is E."""
    requested: torch.Tensor
    """bool (T, E): the experts a token asked for, before any were dropped for lack of capacity."""
    logits: torch.Tensor
    """float32 (T, E), before balancing bias and selection noise."""
    probabilities: torch.Tensor
    """float32 (T, E), rows sum to 1: the scores, normalised for sigmoid. What balance losses look at."""
    cutoff: torch.Tensor | None
    """float32 (T,), the (k+1)-th largest choice score; set for the quantile rule only."""


def choice_scores(logits: torch.Tensor, scores: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """What the top-k is taken of, (T, E): the scores (or logits, or sigmoids of them) plus the balancing bias.

    Args:
        kind: "score": the router's own score function. "logit" and "sigmoid": as the quantile rule says.
    """
    base = {"score": scores, "logit": logits}.get(kind)
    if base is None:
        base = torch.sigmoid(logits)
    return base if bias is None else base + bias


def limit_to_groups(choice: torch.Tensor, num_groups: int, top_groups: int) -> torch.Tensor:
    """Group-limited routing (DeepSeek-V3, arXiv 2412.19437): keep experts of the best groups, -inf elsewhere.

    A group's worth is the sum of its two best choice scores.

    Args:
        choice: (T, E), experts of a group next to each other.
    """
    grouped = choice.unflatten(-1, (num_groups, -1))  # (T, G, E / G)
    worth = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    best = worth.topk(top_groups, dim=-1).indices
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter(-1, best, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def expert_capacity(tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Rows an expert takes of ``tokens`` tokens: ceil(factor * tokens * k / E), at least 1 (GShard, Switch)."""
    return max(1, -int(-factor * tokens * top_k // num_experts))


def drop_overflow(
    experts: torch.Tensor, weights: torch.Tensor, num_experts: int, capacity: int, by: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send assignments beyond an expert's capacity nowhere: id E, weight 0.

    Args:
        experts, weights: (T, k).
        by: "position": earlier tokens go first (Switch, arXiv 2101.03961). "score": larger weights go first.
    """
    flat, keys = experts.flatten(), weights.detach().flatten()
    order = keys.argsort(descending=True, stable=True) if by == "score" else torch.arange(len(flat), device=flat.device)
    by_expert = order[flat[order].argsort(stable=True)]  # assignments of one expert together, best first
    ends = torch.searchsorted(flat[by_expert], torch.arange(num_experts, device=flat.device), right=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    rank = torch.arange(len(flat), device=flat.device) - starts[flat[by_expert]]
    place = torch.empty_like(rank).scatter(0, by_expert, rank).view_as(experts)
    kept = place < capacity
    return torch.where(kept, experts, num_experts), weights * kept


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Gate(nn.Linear):
    """The router's linear map, in the dtype of its input. A module that is called, so that it can be spread."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(T, dim) -> (T, E)."""
        return F.linear(x, self.weight.to(x.dtype))


class Router(nn.Module):
    """Token-choice (or expert-choice) routing over E experts.

    Args:
        dim: width of a token.
        shape: experts, top-k, score function, groups, normalisation and scale of the weights.
        moe: router dtype, jitter, Gumbel noise, capacity, and the balancing rules that replace the router's wish.
    """

    def __init__(self, dim: int, shape: MoEShape, moe: Moe):
        super().__init__()
        self.shape = shape
        self.moe = moe
        self.dtype = torch.bfloat16 if moe.router_dtype == "bfloat16" else torch.float32
        self.gate = Gate(dim, shape.num_experts, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        numbers: torch.Tensor,
        valid: torch.Tensor,
        noise_key: torch.Tensor,
        gumbel_tau: torch.Tensor,
        bias: torch.Tensor | None,
        choose_by: str = "score",
    ) -> Routing:
        """Route T tokens.

        Args:
            x: (T, dim).
            numbers: int64 (T,), non-negative: the token's number in the whole of training, which noise is a function
                of.
            valid: bool (T,); False for padding, which expert choice leaves out.
            noise_key: int64 (2,).
            gumbel_tau: scalar, scale of the selection noise.
            bias: float32 (E,), added to the choice.
            choose_by: see :func:`choice_scores`.
        """
        shape, moe, experts = self.shape, self.moe, self.shape.num_experts
        # Autocast would lower the product to bfloat16 whatever the dtype of its operands.
        with torch.autocast(x.device.type, enabled=False):
            dtype = torch.float64 if x.dtype == torch.float64 else self.dtype
            x = x.to(dtype)
            if moe.jitter and self.training:
                # Switch Transformer: input times U(1 - e, 1 + e).
                spread = uniform(noise_key, _JITTER, numbers, x.shape[-1])
                x = x * (1.0 + moe.jitter * (2.0 * spread - 1.0)).to(x.dtype)
            logits = self.gate(x)
        if moe.balance == "random_logits":
            # Megatron's forced balance: standard normal logits, the gradient passed through as if they were the
            # router's.
            logits = logits + (normal(noise_key, _RANDOM, numbers, experts).to(logits.dtype) - logits).detach()
        elif moe.balance == "forced_skew":
            # One fixed draw an expert: the same experts stay hot.
            skew = normal(noise_key, _SKEW, torch.zeros_like(numbers[:1]), experts)
            logits = logits + (moe.skew_strength * skew).to(logits.dtype)
        scores = self._scores(logits)
        if moe.routing == "expert_choice":
            return self._expert_choice(logits, scores, valid)

        noisy, noisy_scores = logits, scores
        if moe.gumbel_tau and self.training:
            noisy = wide(logits) + gumbel_tau * gumbel(noise_key, _GUMBEL, numbers, experts)
            noisy_scores = self._scores(noisy)
        with torch.no_grad():
            choice = choice_scores(wide(noisy), wide(noisy_scores), bias, choose_by)
            if shape.num_groups > 1:
                choice = limit_to_groups(choice, shape.num_groups, shape.top_groups)
            wanted = shape.top_k + (moe.balance == "quantile")
            best = choice.topk(wanted, dim=-1)
            chosen = best.indices[:, : shape.top_k]
            cutoff = best.values[:, -1] if moe.balance == "quantile" else None
            if moe.balance == "forced_uniform":
                # torchtitan's forced balance: exact round robin over tokens.
                slots = torch.arange(shape.top_k, device=x.device)
                chosen = (numbers[:, None] * shape.top_k + slots) % experts
            requested = torch.zeros_like(choice, dtype=torch.bool).scatter(1, chosen, True)
        weights = wide(scores).gather(1, chosen)
        if shape.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * shape.route_scale
        if moe.capacity != "none":
            capacity = expert_capacity(len(x), shape.top_k, experts, moe.capacity_factor)
            chosen, weights = drop_overflow(chosen, weights, experts, capacity, moe.capacity)
        return Routing(chosen, weights, requested, wide(logits), self._probabilities(scores), cutoff)

    def max_rows(self, tokens: int) -> int:
        """Most rows that experts have to process for ``tokens`` tokens."""
        shape = self.shape
        rows = tokens * shape.top_k
        if self.moe.capacity != "none":
            capacity = expert_capacity(tokens, shape.top_k, shape.num_experts, self.moe.capacity_factor)
            rows = min(rows, capacity * shape.num_experts)
        if self.moe.routing == "expert_choice":
            rows = expert_capacity(tokens, shape.top_k, shape.num_experts, 1.0) * shape.num_experts
        return rows

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1) if self.shape.score_func == "softmax" else logits.sigmoid()

    def _probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        scores = wide(scores)
        # DeepSeek-V3, equation 19: sigmoid affinities are normalised over all experts for the balance loss.
        return scores if self.shape.score_func == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def _expert_choice(self, logits: torch.Tensor, scores: torch.Tensor, valid: torch.Tensor) -> Routing:
        """Each expert takes its T k / E best tokens (Zhou et al., arXiv 2202.09368).

        Whether a token is taken depends on tokens after it: in a causal model this leaks the future.
        """
        shape, experts = self.shape, self.shape.num_experts
        scores = wide(scores)
        capacity = min(len(scores), expert_capacity(len(scores), shape.top_k, experts, 1.0))
        with torch.no_grad():
            best = scores.masked_fill(~valid[:, None], -torch.inf).topk(capacity, dim=0).indices
            taken = torch.zeros_like(scores, dtype=torch.bool).scatter(0, best, True) & valid[:, None]
            ids = torch.where(taken, torch.arange(experts, device=scores.device), experts)
        weights = scores * taken * shape.route_scale
        return Routing(ids, weights, taken, wide(logits), self._probabilities(scores), None)
