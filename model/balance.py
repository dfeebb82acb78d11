"""What a MoE layer remembers about its load, and how it acts on it once an optimizer step.

Counting happens outside the block that checkpointing may run twice: a block *returns* its :class:`Observation` and the
decoder hands it to :meth:`Balance.count`, in training and with gradients on only. Counts are int64 and exact.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from config.schema import Moe
from config.shapes import MoEShape
from model import quantile
from model.balance_losses import aux_loss, aux_loss_of, router_entropy, sequence_aux_loss, z_loss
from model.noise import noise_key
from model.router import Routing

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sum over the ranks that hold different tokens; returns the sum, may work in place."""

BIAS_RULES = ("bias_sign", "bias_proportional", "quantile")


class Observation(NamedTuple):
    """What one forward pass of one layer saw. No gradient."""

    counts: torch.Tensor
    """int64 (E,): assignments asked for by valid tokens."""
    kept: torch.Tensor
    """int64 (E,): those that were not dropped for lack of capacity."""
    tokens: torch.Tensor
    """int64 scalar: valid tokens."""
    measures: torch.Tensor
    """float32 (4,): balance loss and z-loss without coefficient, router entropy in nats, share that was dropped."""
    experts: torch.Tensor
    """int64 (T, slots): the choice itself."""
    margins: torch.Tensor | None
    """For the quantile rule: a quantile (E,), a histogram (E, bins) or every margin (T, E)."""


class Balance(nn.Module):
    """Balancing state of one layer. Its buffers keep their dtype whatever the model is cast to.

    Args:
        shape: experts and top-k.
        moe: the balancing rule and its numbers.
        noise_seed: of routing noise.
        layer: global index of the block.

    Buffers that a checkpoint holds: ``bias`` (float32, rules with a bias) and ``previous_counts`` (int64, with
    f_source "previous_step").
    """

    def __init__(self, shape: MoEShape, moe: Moe, noise_seed: int, layer: int):
        super().__init__()
        self.shape, self.moe, self.layer = shape, moe, layer
        self.key = noise_key(noise_seed, f"layers.{layer}.moe")
        self.rule = quantile.quantile_rule(moe) if moe.balance == "quantile" else None
        self.choose_by = self.rule.score if self.rule else "score"
        self.reduce_running: AllReduce | None = None  # set by the trainer for f_source = "running" on several ranks
        self.reduce_group: AllReduce | None = None  # over the ranks that share a balance group, set where they do
        self.group_ranks = 1
        self.columns: list[torch.Tensor] = []
        self.last_coefficients: tuple[float, ...] | None = None
        experts = shape.num_experts
        exact = torch.bfloat16 if moe.count_dtype == "bfloat16" else torch.int64

        def state(name: str, size: tuple[int, ...], dtype: torch.dtype, kept: bool = False) -> None:
            self.register_buffer(name, torch.zeros(size, dtype=dtype), persistent=kept)

        self.bias: torch.Tensor | None = None
        if moe.balance in BIAS_RULES:
            del self.bias
            state("bias", (experts,), torch.float32, kept=True)
        if moe.balance == "global_aux_loss" and moe.f_source == "previous_step":
            state("previous_counts", (experts,), torch.int64, kept=True)
        if moe.balance == "global_aux_loss" and moe.f_source == "exact":
            state("global_counts", (experts,), torch.int64)
        if self.rule:
            bins = (experts, quantile.BINS) if self._histogram_pool else (experts,)
            state("quantile_sum", bins, torch.int64 if self._histogram_pool else torch.float32)
            state("quantile_groups", (), torch.int64)
        state("noise_key", (2,), torch.int64)
        state("counts", (experts,), exact)
        state("kept", (experts,), torch.int64)
        state("tokens", (), torch.int64)
        state("load", (experts,), torch.int64)  # counts of the last whole step, over all ranks
        state("coefficients", (3,), torch.float32)  # balance and z-loss, both over the balance groups; Gumbel's tau
        state("measured", (5,), torch.float32)  # sums of Observation.measures since the last report, and how many
        self.reset()

    @property
    def _histogram_pool(self) -> bool:
        return self.rule is not None and (self.rule.pool, self.rule.estimator) == ("global", "histogram")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Balance":
        """Follow ``model.to(device)``, ignore casts: in bfloat16 a count sticks at 256 and a bias loses its steps."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def reset(self) -> None:
        """Fill the buffers in place, as they are before the first step."""
        for buffer in self.buffers():
            buffer.zero_()
        self.noise_key.copy_(torch.tensor(self.key, dtype=torch.int64))
        self.columns.clear()
        self.last_coefficients = None
        self.set_step(1, total_steps=1, balance_groups=1)

    def set_step(self, step: int, *, total_steps: int, balance_groups: int) -> None:
        """Set this step's coefficients.

        Args:
            step: counted from 1.
            total_steps: length of a decay that moe.coeff_decay_steps does not give.
            balance_groups: micro-batches of the step over all ranks; each is one balance group.
        """
        moe = self.moe
        left = decayed(moe.coeff_decay, step, moe.coeff_decay_steps or total_steps, moe.coeff_final_factor)
        aux = moe.extra_sequence_coeff if self.bias is not None else moe.aux_loss_coeff
        tau = moe.gumbel_tau * (decayed("linear", step, moe.gumbel_decay_steps, 0.0) if moe.gumbel_decay_steps else 1.0)
        values = (aux * left / balance_groups, moe.z_loss_coeff * left / balance_groups, tau)
        if values != self.last_coefficients:  # a copy from the host stops it until the device has caught up
            self.coefficients.copy_(torch.tensor(values))
            self.last_coefficients = values

    def seen(self) -> torch.Tensor | None:
        """What the step counted so far, for a layer that needs it (f_source "running")."""
        running = self.moe.balance == "global_aux_loss" and self.moe.f_source == "running"
        return self.counts.clone() if running else None

    def observe(
        self, routing: Routing, valid: torch.Tensor, seen: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, Observation]:
        """The loss to inject for one micro-batch, and what there is to count.

        Args:
            routing: of the micro-batch's T = B x S tokens.
            valid: bool (B, S).
            seen: int64 (E,), what this step counted before, for f_source "running". An argument, so that recomputation
                sees what the first pass saw.

        Returns:
            A float32 scalar with its coefficient and share of the step, or None where no loss is asked for. Of ranks
            that share a balance group, each has a part of a sum.
        """
        moe, top_k, flat, reduce = self.moe, self.shape.top_k, valid.flatten(), self.reduce_group
        chosen = routing.requested & flat[:, None]
        counts = chosen.sum(0)
        if moe.balance == "global_aux_loss":
            source = {"exact": "global_counts", "previous_step": "previous_counts"}.get(moe.f_source)
            shares = getattr(self, source) if source else counts if seen is None else counts + seen
            if source is None and self.reduce_running is not None:
                shares = self.reduce_running(shares)
            balance = aux_loss_of(routing.probabilities, shares, flat, top_k, reduce)
        elif moe.balance == "sequence_aux_loss" or (self.bias is not None and moe.extra_sequence_coeff):
            probabilities, requested = (t.unflatten(0, valid.shape) for t in (routing.probabilities, routing.requested))
            balance = sequence_aux_loss(probabilities, requested, valid, top_k, reduce)
        else:
            balance = aux_loss(routing.probabilities, routing.requested, flat, top_k, reduce)
        z = z_loss(routing.logits, flat, reduce)

        terms = []
        if moe.balance.endswith("aux_loss") or (self.bias is not None and moe.extra_sequence_coeff):
            terms.append(self.coefficients[0] * balance)
        if moe.z_loss_coeff:
            terms.append(self.coefficients[1] * z)
        loss = torch.stack(terms).sum() if terms else None
        with torch.no_grad():
            entropy = router_entropy(routing.probabilities, flat)
            kept = self._kept(routing, chosen, flat)
            dropped = 1.0 - kept.sum() / counts.sum().clamp(min=1)
            n = self.group_ranks  # the mean over ranks of n times a part is the whole
            seen_now = Observation(
                counts=counts,
                kept=kept,
                tokens=flat.sum(),
                measures=torch.stack([t.detach().float() for t in (balance * n, z * n, entropy, dropped)]),
                experts=routing.experts,
                margins=self._margins(routing, flat),
            )
        return loss, seen_now

    def _kept(self, routing: Routing, chosen: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        if self.moe.capacity == "none":
            return chosen.sum(0)
        ids = torch.where(valid[:, None], routing.experts, self.shape.num_experts)
        return (ids.flatten()[:, None] == torch.arange(self.shape.num_experts, device=ids.device)).sum(0)

    def _margins(self, routing: Routing, valid: torch.Tensor) -> torch.Tensor | None:
        rule, bias = self.rule, self.bias
        if rule is None or bias is None or routing.cutoff is None:
            return None
        scores = routing.logits if rule.score == "logit" else routing.logits.sigmoid()
        found = quantile.margins(scores, routing.cutoff, valid, rule.statistic)
        if rule.pool == "global":
            return found if rule.estimator == "exact" else quantile.histogram(found, valid, bias, rule)
        if rule.estimator == "exact":
            return quantile.exact_quantile(found, valid.sum(), self.shape.top_k)
        counted = quantile.histogram(found, valid, bias, rule)
        return quantile.histogram_quantile(counted, bias, self.shape.top_k, rule)

    @torch.no_grad()
    def count(self, seen: Observation) -> None:
        """Add one micro-batch to this step."""
        self.counts += seen.counts.to(self.counts.dtype)
        self.kept += seen.kept
        self.tokens += seen.tokens
        self.measured[:-1] += seen.measures
        self.measured[-1] += 1
        if self.rule is not None and seen.margins is not None:
            some = seen.tokens > 0
            self.quantile_groups += some
            if self.rule.pool == "global" and self.rule.estimator == "exact":
                self.columns.append(seen.margins)
            else:
                self.quantile_sum += torch.where(some, seen.margins, 0).to(self.quantile_sum.dtype)

    @torch.no_grad()
    def update(self, step: int, counts: torch.Tensor, all_reduce: AllReduce) -> None:
        """Act on a whole step's counts (E,), already summed over ranks, and start the next step's."""
        moe, total = self.moe, counts.sum()
        if self.bias is not None and (moe.bias_freeze_step is None or step <= moe.bias_freeze_step):
            if moe.balance == "quantile":
                self._update_quantile(all_reduce)
            else:
                self.bias.copy_(self.bias + bias_step(counts, moe.balance, moe.bias_update_rate))
        if "previous_counts" in self._buffers:
            self.previous_counts.copy_(counts)
        self.load.copy_(torch.where(total > 0, counts, self.load))
        self.clear()

    def clear(self) -> None:
        """Forget what the present step counted."""
        for name in ("counts", "kept", "tokens", "global_counts", "quantile_sum", "quantile_groups"):
            if name in self._buffers:
                getattr(self, name).zero_()
        self.columns.clear()

    def _update_quantile(self, all_reduce: AllReduce) -> None:
        rule, bias = self.rule, self.bias
        assert rule is not None and bias is not None
        top_k = self.shape.top_k
        groups = all_reduce(self.quantile_groups.clone())
        if rule.pool == "microbatch_mean":
            new = all_reduce(self.quantile_sum.clone()) / groups.clamp(min=1)
        elif rule.estimator == "histogram":
            new = quantile.histogram_quantile(all_reduce(self.quantile_sum.clone()), bias, top_k, rule)
        else:
            column = torch.cat(self.columns) if self.columns else bias.new_empty(0, bias.numel())
            new = quantile.pooled_quantile(column, all_reduce(self.tokens.clone()), top_k, all_reduce)
        new = self.moe.quantile_ema * bias + (1.0 - self.moe.quantile_ema) * new
        if rule.center:
            new = new - new.mean()
        bias.copy_(torch.where(groups > 0, new, bias))


def bias_step(counts: torch.Tensor, rule: str, rate: float) -> torch.Tensor:
    """The change of the bias after a step, mean-centred: float32 (E,).

    "bias_sign": u sign(m - c_i) (Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3). "bias_proportional":
    u (m - c_i) / m, with m the mean count. The paper and Megatron do not centre; torchtitan does. It changes no choice
    and keeps the bias from drifting away from the scores.
    """
    mean = counts.double().mean() if counts.dtype == torch.int64 else counts.mean()
    missing = mean - counts
    step = missing.sign() if rule == "bias_sign" else missing / mean.clamp(min=1)
    return (rate * (step - step.mean())).float()


def decayed(kind: str, step: int, steps: int, final: float) -> float:
    """Share of a coefficient that is left at ``step`` (from 1): 1 at the first step, ``final`` from ``steps`` on."""
    if kind == "constant":
        return 1.0
    progress = min(1.0, (step - 1) / max(1, steps - 1))
    shape = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return final + (1.0 - final) * shape


def balances(model: nn.Module) -> dict[str, Balance]:
    """Every balancing state under its module name, in order of layers."""
    found: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, Balance)}
    return found
