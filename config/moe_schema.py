"""The [moe] section: routing, balancing and experts. See config/schema.py for how a schema is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.field import key

_AUX_RULES = ("aux_loss", "global_aux_loss", "sequence_aux_loss")
_BIAS_RULES = ("bias_sign", "bias_proportional")


@dataclass
class Moe:
    """Mixture of experts. Inert unless the model's flavor has experts; see docs/moe.md."""

    num_experts: int | None = key(None, minimum=2)
    """Routed experts of a MoE layer. Unset: the flavor's."""
    top_k: int | None = key(None, minimum=1)
    """Experts that process a token; below num_experts. Unset: the flavor's."""
    hidden_dim: int | None = key(None, minimum=1)
    """Width of one routed expert. Unset: the flavor's."""
    num_shared_experts: int | None = key(None, minimum=0)
    """Experts that process every token, kept as one feed-forward layer of their joint width. Unset: the flavor's."""
    first_dense_layers: int | None = key(None, minimum=0)
    """Blocks at the bottom that keep a dense feed-forward layer of model.hidden_dim. Unset: the flavor's."""
    every_n_layers: int | None = key(None, minimum=1)
    """Above them, every n-th block (n, 2n, ... counted from 1) has experts, the others none. Unset: the flavor's."""
    score_func: Literal["softmax", "sigmoid"] | None = None
    """Router logits to scores. Unset: the flavor's."""
    route_norm: bool | None = None
    """Divide a token's top-k scores by their sum. Unset: the flavor's."""
    route_scale: float | None = key(None, minimum=0.0)
    """Factor on the routing weights. Unset: the flavor's."""
    num_groups: int | None = key(None, minimum=1)
    """Groups of experts for group-limited routing; divides num_experts. 1: none. Unset: the flavor's."""
    top_groups: int | None = key(None, minimum=1)
    """Groups a token may choose experts from, by the sum of each group's two best scores. Unset: the flavor's."""
    initial_skew: float | None = key(None, minimum=0.0)
    """Spread of the router's row lengths at the start, in units of their logarithm: some experts are hot. Unset: 0."""
    routing: Literal["token_choice", "expert_choice"] = "token_choice"
    """expert_choice: each expert takes its best tokens of a micro-batch. Sees the future: never for causal models."""
    router_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the router's product and scores."""
    experts: Literal["grouped_mm", "loop", "quack"] = "grouped_mm"
    """Expert kernels. loop: the readable reference. quack: CuTe DSL on Hopper. Same results."""
    row_kernels: Literal["auto", "triton", "torch"] = "auto"
    """What moves rows to experts and back on a GPU. torch: the readable functions, compiled. auto: triton if there."""
    dispatcher: Literal["all_to_all", "all_to_all_dedup"] = "all_to_all"
    """How tokens reach experts on other ranks. all_to_all: once an expert. all_to_all_dedup: once a rank."""
    comm_overlap: Literal["none", "shared_expert", "experts"] = "none"
    """What is computed while tokens travel. shared_expert: the shared experts. experts: these, and others in parts."""
    comm_overlap_degree: int = key(4, minimum=2, parent="moe.comm_overlap", parent_values=("experts",))
    """Parts in which a rank computes its experts, neighbours together. At most one for each expert of the rank."""
    balance: Literal[
        "none",
        "aux_loss",
        "global_aux_loss",
        "sequence_aux_loss",
        "bias_sign",
        "bias_proportional",
        "quantile",
        "forced_uniform",
        "random_logits",
        "forced_skew",
    ] = "aux_loss"
    """Balancing rule. The last three ignore the router's wish: round robin, random, or a fixed skew."""
    aux_loss_coeff: float = key(1e-2, minimum=0.0, parent="moe.balance", parent_values=_AUX_RULES)
    """Coefficient of the balance loss."""
    f_source: Literal["exact", "running", "previous_step"] = key(
        "running", parent="moe.balance", parent_values=("global_aux_loss",)
    )
    """Where the global load comes from: an extra forward pass, the micro-batches so far, or the step before."""
    bias_update_rate: float = key(1e-3, minimum=0.0, parent="moe.balance", parent_values=_BIAS_RULES)
    """Size u of a bias update."""
    bias_freeze_step: int | None = key(None, minimum=1, parent="moe.balance", parent_values=_BIAS_RULES)
    """Step after which the bias stays as it is. Unset: never."""
    extra_sequence_coeff: float = key(0.0, minimum=0.0, parent="moe.balance", parent_values=(*_BIAS_RULES, "quantile"))
    """Coefficient of a sequence balance loss beside the bias (DeepSeek-V3: 1e-4)."""
    quantile_preset: Literal["megatron", "kimi_k3", "custom"] = key(
        "kimi_k3", parent="moe.balance", parent_values=("quantile",)
    )
    """megatron: logits, mean of exact micro-batch quantiles. kimi_k3: sigmoid scores, histogram of the global batch."""
    quantile_score: Literal["logit", "sigmoid"] = key(
        "sigmoid", parent="moe.quantile_preset", parent_values=("custom",)
    )
    """What the bias is added to."""
    quantile_statistic: Literal["margin", "column"] = key(
        "margin", parent="moe.quantile_preset", parent_values=("custom",)
    )
    """margin: quantile of the token's threshold minus the score. column: of minus the score alone."""
    quantile_pool: Literal["microbatch_mean", "global"] = key(
        "global", parent="moe.quantile_preset", parent_values=("custom",)
    )
    """microbatch_mean: average the quantiles of micro-batches. global: one quantile over the global batch."""
    quantile_estimator: Literal["exact", "histogram"] = key(
        "exact", parent="moe.quantile_preset", parent_values=("custom",)
    )
    """histogram: 1000 bins an expert, interpolated. exact keeps every score of the step."""
    quantile_center: bool = key(True, parent="moe.quantile_preset", parent_values=("custom",))
    """Subtract the mean bias after each update."""
    quantile_ema: float = key(0.0, minimum=0.0, maximum=1.0, parent="moe.balance", parent_values=("quantile",))
    """Share of the old bias that each update keeps."""
    skew_strength: float = key(1.0, minimum=0.0, parent="moe.balance", parent_values=("forced_skew",))
    """Standard deviation of the fixed bias that forced_skew adds to the logits."""
    z_loss_coeff: float = key(0.0, minimum=0.0)
    """Coefficient of the router z-loss, the mean squared logsumexp of the logits (ST-MoE: 1e-3)."""
    coeff_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of aux_loss_coeff, extra_sequence_coeff and z_loss_coeff."""
    coeff_decay_steps: int | None = key(None, minimum=1, parent="moe.coeff_decay", parent_values=("linear", "cosine"))
    """Length of that decay. Unset: training.steps."""
    coeff_final_factor: float = key(
        0.0, minimum=0.0, maximum=1.0, parent="moe.coeff_decay", parent_values=("linear", "cosine")
    )
    """Share of the coefficients that is left at its end."""
    jitter: float = key(0.0, minimum=0.0, maximum=1.0)
    """Multiply the router's input by U(1 - jitter, 1 + jitter) in training (Switch: 0.01)."""
    gumbel_tau: float = key(0.0, minimum=0.0)
    """Add this times Gumbel noise to the logits that choose experts, in training. Weights stay without noise."""
    gumbel_decay_steps: int | None = key(None, minimum=1)
    """Steps over which gumbel_tau falls to 0. Unset: constant."""
    capacity: Literal["none", "position", "score"] = "none"
    """Drop what exceeds an expert's capacity: the last tokens by position, or those of the lowest weight."""
    capacity_factor: float = key(1.25, minimum=0.0, parent="moe.capacity", parent_values=("position", "score"))
    """Capacity of an expert in units of the mean load of a micro-batch."""
    count_dtype: Literal["int64", "bfloat16"] = "int64"
    """Accumulator of expert loads. bfloat16 reproduces a published counting bug."""
    log_per_layer: bool = False
    """Log balance, dead experts and losses of every MoE layer, not only over layers."""
