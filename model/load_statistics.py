"""How evenly experts are loaded, from counts, and what a run reports of it. A balance loss is no certificate: counts
are.
"""

import math
from collections.abc import Callable, Sequence

import torch

from model.balance import AllReduce, Observation
from model.decoder import Decoder


def max_violation(counts: torch.Tensor) -> torch.Tensor:
    """MaxVio = max c / mean c - 1 along the last dimension: 0 when even, E / k - 1 when k experts get everything.

    (Wang et al., arXiv 2408.15664.) No tokens at all: 0.
    """
    counts = counts.double()
    mean = counts.mean(-1)
    return torch.where(mean > 0, counts.amax(-1) / mean.clamp(min=1e-300) - 1.0, 0.0)


def variation(counts: torch.Tensor) -> torch.Tensor:
    """Coefficient of variation std c / mean c along the last dimension, over all E experts."""
    counts = counts.double()
    return counts.std(-1, correction=0) / counts.mean(-1).clamp(min=1e-300)


def effective_share(counts: torch.Tensor) -> torch.Tensor:
    """exp(entropy of c / sum c) / E along the last dimension: 1 when even, k / E when k experts share everything."""
    share = counts.double() / counts.double().sum(-1, keepdim=True).clamp(min=1e-300)
    return torch.exp(-torch.special.xlogy(share, share).sum(-1)) / counts.shape[-1]


def dead_experts(counts: torch.Tensor) -> torch.Tensor:
    """int64: how many of the last dimension got nothing."""
    return (counts == 0).sum(-1)


def noise_violation(tokens: int, num_experts: int, top_k: int) -> float:
    """MaxVio that an ideal router shows by chance: the expected maximum of E nearly normal counts, over their mean.

    Each count has mean m = T k / E and variance m (1 - k / E); the expected maximum of E normals is close to the
    quantile at (E - 0.375) / (E + 0.25) (Blom).
    """
    mean = tokens * top_k / num_experts
    quantile = torch.special.ndtri(torch.tensor((num_experts - 0.375) / (num_experts + 0.25))).item()
    return quantile * math.sqrt((1 - top_k / num_experts) / mean)


def moe_metrics(
    counts: torch.Tensor,
    measured: torch.Tensor,
    layers: Sequence[int],
    *,
    capacity: bool,
    per_layer: bool = False,
    expert_ranks: int = 1,
) -> dict[str, float]:
    """What a log step reports of all MoE layers, wherever they are held.

    Args:
        counts: int64 (layers, E) on the CPU, assignments of the last step over all ranks.
        measured: (layers, 5) on the CPU, sums over all ranks of :attr:`model.balance.Observation.measures` since the
            last report, and how many were summed.
        layers: global index of each row.
        capacity: whether assignments may be dropped.
        expert_ranks: ranks that hold different experts, an equal share by id each.

    Tags: ``moe/max_violation`` and ``moe/mean_violation`` (MaxVio over layers), ``moe/load_variation`` (mean over
    layers), ``moe/effective_experts`` (smallest layer), ``moe/dead_experts`` (all layers), ``moe/aux_loss``,
    ``moe/z_loss`` (without coefficients, means over layers), ``moe/router_entropy`` (nats), and with a capacity
    ``moe/dropped`` (share). With several ``expert_ranks`` ``moe/device_max_violation``, MaxVio of the loads of ranks,
    largest over layers. With ``per_layer`` MaxVio, dead experts and losses of each layer too.
    """
    measured = measured.double()
    means = measured[:, :-1] / measured[:, -1:].clamp(min=1)
    violations = max_violation(counts)
    names = ("moe/aux_loss", "moe/z_loss", "moe/router_entropy", "moe/dropped")
    values = {
        "moe/max_violation": float(violations.max()),
        "moe/mean_violation": float(violations.mean()),
        "moe/load_variation": float(variation(counts).mean()),
        "moe/effective_experts": float(effective_share(counts).min()),
        "moe/dead_experts": float(dead_experts(counts).sum()),
        **{name: float(means[:, i].mean()) for i, name in enumerate(names)},
    }
    if not capacity:
        del values["moe/dropped"]
    if expert_ranks > 1:
        of_ranks = max_violation(counts.unflatten(-1, (expert_ranks, -1)).sum(-1))
        values["moe/device_max_violation"] = float(of_ranks.max())
    if per_layer:
        for row, index in enumerate(layers):
            layer = f"moe_layers/{index}"
            values[f"{layer}/max_violation"] = float(violations[row])
            values[f"{layer}/dead_experts"] = float(dead_experts(counts[row]))
            values[f"{layer}/aux_loss"] = float(means[row, 0])
            values[f"{layer}/z_loss"] = float(means[row, 1])
            if expert_ranks > 1:
                values[f"{layer}/device_max_violation"] = float(of_ranks[row])
    return values


class RoutingProbe:
    """How much the choice of experts for a fixed batch changes between log steps.

    Args:
        model: whole, or a rank's pipeline stages; it is put into evaluation mode meanwhile, without gradients.
        forward: runs the batch through all layers. Every rank calls it alike.
    """

    def __init__(self, model: torch.nn.Module, forward: Callable[[], object]):
        self.model, self.forward = model, forward
        self.last: list[torch.Tensor] | None = None

    @torch.no_grad()
    def churn(self, all_reduce: AllReduce) -> dict[str, float]:
        """``moe/churn``: share of (token, expert) pairs that the last call had and this one has not, over layers and
        ranks.

        Nothing at the first call. Every rank calls it. ``all_reduce`` sums over ranks with other tokens or layers.
        """
        now: list[torch.Tensor] = []

        def listen(layer: str, seen: Observation) -> None:
            experts = len(seen.counts)
            pairs = seen.experts.new_zeros(len(seen.experts), experts + 1, dtype=torch.bool)
            now.append(pairs.scatter(1, seen.experts, True)[:, :experts])

        parts = [module for module in self.model.modules() if isinstance(module, Decoder)]
        training = self.model.training
        self.model.eval()
        for part in parts:
            part.on_observation = listen
        try:
            self.forward()
        finally:
            for part in parts:
                part.on_observation = None
            self.model.train(training)
        before, self.last = self.last, now
        if before is None:
            return {}
        totals = torch.zeros(2, dtype=torch.float64, device=next(self.model.parameters()).device)
        for old, new in zip(before, now, strict=True):
            totals += torch.stack([(old & ~new).sum(), old.sum()])
        lost, held = all_reduce(totals).tolist()
        return {"moe/churn": lost / max(1.0, held)}
