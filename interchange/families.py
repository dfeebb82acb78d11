"""The architectures of Hugging Face transformers that a shape can be: which one, and how it names things.

Each row is what its ``modeling_<model_type>.py`` and ``configuration_<model_type>.py`` say (transformers 5.24). All of
them rotate halves, as model/rope.py does, and store a linear layer as (out, in), so no matrix is permuted.
"""

from __future__ import annotations

from dataclasses import dataclass

from config.errors import ConfigError
from config.keys import shown
from config.schema import Moe
from config.shapes import ModelShape

BIAS_RULES = ("bias_sign", "bias_proportional", "quantile")
"""Values of moe.balance under which a learned bias takes part in the choice of experts."""
_FORCED = ("forced_uniform", "random_logits", "forced_skew")


@dataclass(frozen=True)
class ExpertNames:
    """Where a family keeps its experts. ``gate``, ``up`` and ``down`` are the linear layers of one expert."""

    block: str
    gate: str
    up: str
    down: str
    num_experts: str
    """Key of config.json; so is ``hidden_dim``, the width of one expert."""
    hidden_dim: str


@dataclass(frozen=True)
class Family:
    """One architecture."""

    model_type: str
    architecture: str
    rope_theta: float
    """Base of the rotary frequencies if config.json does not name one."""
    qk_norm: str = ""
    """What one norm of a query or key spans: "head", "projection", or "" for no norm."""
    experts: ExpertNames | None = None


_QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "num_experts", "moe_intermediate_size")
_OLMOE_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "num_experts", "intermediate_size")
_MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2", "num_local_experts", "intermediate_size")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", 10_000.0),
        Family("qwen3", "Qwen3ForCausalLM", 10_000.0, "head"),
        Family("mixtral", "MixtralForCausalLM", 1_000_000.0, "", _MIXTRAL_EXPERTS),
        Family("olmoe", "OlmoeForCausalLM", 10_000.0, "projection", _OLMOE_EXPERTS),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", 10_000.0, "head", _QWEN_EXPERTS),
    )
}


def family_of(shape: ModelShape, moe: Moe | None = None) -> Family:
    """The family whose models compute what a model of ``shape`` computes.

    Args:
        moe: the [moe] section that it was trained with; its routing must be one that the family has.

    Raises:
        ConfigError: there is none, a line a reason.
    """
    scope = shape.qk_norm_scope if shape.qk_norm else ""
    if shape.moe is None:
        family = {"": FAMILIES["llama"], "head": FAMILIES["qwen3"]}.get(scope)
    elif scope:
        family = FAMILIES["qwen3_moe" if scope == "head" else "olmoe"]
    else:
        family = FAMILIES["mixtral"] if shape.moe.route_norm else None
    broken = []
    if family is None and shape.moe is None:
        broken.append(
            "a dense model with one query norm over all heads is in no family; model.qk_norm = false is Llama"
        )
    elif family is None:
        broken.append(
            "moe.route_norm = false without query norms is in no family;"
            " moe.route_norm = true is Mixtral, model.qk_norm = true is Qwen3-MoE"
        )
    else:
        broken += _layout(shape, family)
    if shape.moe is not None:
        broken += _routing(shape, moe or Moe())
    if broken or family is None:
        raise ConfigError(
            "This model has no counterpart among Llama, Qwen3, Mixtral, OLMoE and Qwen3-MoE:\n" + "\n".join(broken)
        )
    return family


def _layout(shape: ModelShape, family: Family) -> list[str]:
    found, moe = [], shape.moe
    if family.model_type == "llama" and shape.dim % shape.n_heads:
        found.append(f"model.dim = {shape.dim} is not divisible by model.n_heads = {shape.n_heads}; Llama asks for it")
    if family.model_type == "olmoe" and shape.head_dim * shape.n_heads != shape.dim:
        found.append(f"model.head_dim = {shape.head_dim}: OLMoE's is model.dim / model.n_heads")
    if moe is not None and family.model_type in ("mixtral", "olmoe"):
        for name, value in (("first_dense_layers", 0), ("every_n_layers", 1)):
            if getattr(moe, name) != value:
                found.append(f"moe.{name} = {getattr(moe, name)}: {family.architecture} has experts in every layer")
    return found


def _routing(shape: ModelShape, moe: Moe) -> list[str]:
    found, experts = [], shape.moe
    assert experts is not None
    if experts.score_func != "softmax":
        found.append(f"moe.score_func = {shown(experts.score_func)}: the families score experts by softmax")
    if experts.num_shared_experts:
        found.append(f"moe.num_shared_experts = {experts.num_shared_experts}: the families have routed experts alone")
    if experts.top_groups < experts.num_groups:
        found.append(f"moe.top_groups = {experts.top_groups}: the families do not limit routing to groups")
    if experts.route_scale != 1.0:
        found.append(f"moe.route_scale = {experts.route_scale}: the families do not scale routing weights")
    if moe.balance in BIAS_RULES:
        found.append(f"moe.balance = {shown(moe.balance)}: the families have no bias in the choice of experts")
    if moe.balance in _FORCED:
        found.append(f"moe.balance = {shown(moe.balance)}: the choice of experts was not the router's")
    if moe.routing != "token_choice":
        found.append(f"moe.routing = {shown(moe.routing)}: the families let tokens choose")
    if moe.capacity != "none":
        found.append(f"moe.capacity = {shown(moe.capacity)}: the families drop no token")
    return found
