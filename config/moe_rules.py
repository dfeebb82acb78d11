"""Rules between the keys of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from config.schema import Config
from config.shapes import ModelShape

Said = Callable[[str], str]

_FORCED = ("forced_uniform", "random_logits", "forced_skew")


def moe_rules(config: Config, shape: ModelShape, said: Said) -> Iterator[str]:
    """What is wrong with [moe], a sentence each. A dense shape leaves it unread: its twin with experts is one key
    away.
    """
    moe = config.moe
    if shape.moe is None:
        return
    experts, top_k, groups = shape.moe.num_experts, shape.moe.top_k, shape.moe.num_groups
    if top_k >= experts:
        yield f"{said('moe.top_k')} must be below {said('moe.num_experts')}: else every expert sees every token."
    if experts % groups:
        yield f"{said('moe.num_experts')} is not divisible by {said('moe.num_groups')}."
    elif shape.moe.top_groups > groups:
        yield f"{said('moe.top_groups')} is larger than {said('moe.num_groups')}."
    elif shape.moe.top_groups * (experts // groups) < top_k:
        yield (
            f"{said('moe.top_groups')} groups of {experts // groups} experts hold fewer than {said('moe.top_k')}."
            " Raise moe.top_groups, or lower moe.top_k."
        )
    if shape.moe.first_dense_layers >= shape.n_layers or not any(map(shape.moe.has_experts, range(shape.n_layers))):
        yield (
            f"{said('moe.first_dense_layers')} and {said('moe.every_n_layers')} leave no layer with experts"
            f" in {said('model.n_layers')}."
        )
    if moe.balance == "quantile" and groups > 1:
        yield (
            f"{said('moe.balance')} does not know groups, and {said('moe.num_groups')}."
            ' Set moe.num_groups = 1 and moe.top_groups = 1, or moe.balance = "bias_sign".'
        )
    if moe.balance == "quantile" and moe.gumbel_tau:
        yield f"{said('moe.balance')} with {said('moe.gumbel_tau')}: noise would enter quantiles. Set gumbel_tau = 0."
    if (
        moe.balance in ("bias_sign", "bias_proportional", "quantile", "forced_uniform")
        and moe.routing != "token_choice"
    ):
        yield (
            f"{said('moe.balance')} acts on the choice of tokens, and {said('moe.routing')}: experts choose, and are"
            ' balanced by construction. Set moe.balance = "none".'
        )
    if moe.capacity != "none" and moe.routing == "expert_choice":
        yield f'{said("moe.capacity")} with {said("moe.routing")}: an expert takes as it holds. Set capacity = "none".'
    if moe.capacity != "none" and moe.capacity_factor == 0:
        yield f"{said('moe.capacity_factor')} drops every token. Usual values are 1.0 to 1.5."
    if config.compile.enable and "model" in config.compile.components and moe.experts == "loop":
        yield (
            f"{said('moe.experts')} reads counts on the host and cannot be compiled, and {said('compile.enable')}."
            ' Set moe.experts = "grouped_mm", or compile.enable = false.'
        )
    if moe.experts == "quack" and config.training.mixed_precision_param != "bfloat16":
        yield (
            f"{said('moe.experts')} computes in bfloat16, and {said('training.mixed_precision_param')}."
            ' Set moe.experts = "grouped_mm".'
        )
    section = config.parallelism
    whole = section.expert_parallel_degree > 1 and section.expert_tensor_parallel_degree == 1
    parts = 1 if whole else section.tensor_parallel_degree
    narrow = config.training.mixed_precision_param == "bfloat16" and moe.experts != "loop"
    if narrow and (shape.dim % 8 or (shape.moe.hidden_dim % parts == 0 and shape.moe.hidden_dim // parts % 8)):
        over = "" if parts == 1 else f" over {said('parallelism.tensor_parallel_degree')}"
        yield (
            f"{said('model.dim')} and {said('moe.hidden_dim')}{over}: kernels load 16 bytes at once, so that both sizes"
            " must be multiples of 8 numbers on a rank. Change the size, or the degree."
        )


def moe_notes(config: Config, shape: ModelShape) -> Iterator[str]:
    """What is allowed and may surprise, a sentence each."""
    moe = config.moe
    if shape.moe is None:
        return
    if shape.moe.top_k == 1 and shape.moe.route_norm:
        yield (
            "moe.top_k = 1 with moe.route_norm = true: the one weight is always 1, so the router gets no gradient from"
            " the loss. Set moe.route_norm = false."
        )
    if moe.routing == "expert_choice":
        yield 'moe.routing = "expert_choice" lets later tokens decide what earlier ones get: causal losses are too low.'
    if moe.balance in _FORCED:
        yield f'moe.balance = "{moe.balance}" overrules the router: a ceiling or floor for speed, not a way to train.'
    if moe.count_dtype == "bfloat16":
        yield 'moe.count_dtype = "bfloat16" reproduces a published bug: counts stick at 256.'
    if moe.balance in ("aux_loss", "global_aux_loss", "sequence_aux_loss") and moe.aux_loss_coeff >= 0.1:
        yield f"moe.aux_loss_coeff = {moe.aux_loss_coeff}: usual values are 1e-3 to 1e-2; 0.1 costs loss."
