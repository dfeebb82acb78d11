"""config.json of Hugging Face transformers, into a shape and out of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.keys import shown
from config.shapes import ModelShape, MoEShape, RopeScaling
from interchange.families import FAMILIES, ExpertNames, Family, family_of

_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "feed-forward layers are SwiGLU"),
    "attention_bias": ((False, None), "linear layers have no bias"),
    "mlp_bias": ((False, None), "linear layers have no bias"),
    "attention_dropout": ((0, None), "there is no dropout"),
    "clip_qkv": ((None,), "queries, keys and values are not clipped"),
    "partial_rotary_factor": ((1, None), "the rotary embedding turns all features of a head"),
    "quantization_config": ((None,), "weights are read as they are; dequantise them first"),
}
"""Key of config.json -> (values that a shape stands for, why no other). A key that is absent has the first of them."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises:
        ConfigError: it is missing or no JSON object.
    """
    path = Path(folder).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Expected a Hugging Face folder with config.json.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return config


def read_hf_config(folder: str | Path) -> ModelShape:
    """The shape of the model in a Hugging Face folder.

    Raises:
        ConfigError: config.json is missing, or asks for what a shape cannot say; every such key, a line each.
    """
    return shape_of(read_config(folder), str(Path(folder) / "config.json"))


def hf_family(config: dict[str, Any], where: str) -> Family:
    """The family that config.json names. ConfigError: it is not one of ours."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        known = ", ".join(shown(name) for name in FAMILIES)
        raise ConfigError(f"{where}: model_type = {shown(config.get('model_type'))}: not supported; known: {known}")
    return family


def shape_of(config: dict[str, Any], where: str) -> ModelShape:
    """The shape that config.json describes; ``where`` leads an error. Raises as :func:`read_hf_config`."""
    family = hf_family(config, where)
    broken = []
    for key, (accepted, why) in _FIXED.items():
        value = config.get(key, accepted[0])
        if not any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in accepted):
            broken.append(f"{where}: {key} = {shown(value)}: {why}")
    windowed = config.get("use_sliding_window", family.model_type == "mixtral")
    if windowed and config.get("sliding_window") is not None:
        broken.append(f"{where}: sliding_window = {shown(config['sliding_window'])}: attention reaches every position")
    elif kinds := sorted({kind for kind in config.get("layer_types") or [] if kind != "full_attention"}):
        broken.append(f"{where}: layer_types holds {shown(kinds[0])}: attention reaches every position")

    def number(key: str, *, default: Any = None) -> Any:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            broken.append(f"{where}: {key} = {shown(value)}: expected a whole number above 0")
            return 1
        return value

    dim, heads = number("hidden_size"), number("num_attention_heads")
    theta, scaling = _rope(config, family, where, broken)
    tied = config.get("tie_word_embeddings", False)
    layers, moe, hidden = number("num_hidden_layers"), None, 0
    if family.experts is not None:
        moe = _experts(config, family.experts, family, number, where, broken)
        hidden = number("intermediate_size") if family.model_type == "qwen3_moe" else moe.top_k * moe.hidden_dim
    eps = config.get("rms_norm_eps")
    if not isinstance(eps, float | int) or isinstance(eps, bool) or eps < 0:
        broken.append(f"{where}: rms_norm_eps = {shown(eps)}: expected a number of 0 or more")
        eps = 0.0
    shape = ModelShape(
        vocab_size=number("vocab_size"),
        dim=dim,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=number("num_key_value_heads", default=heads),
        hidden_dim=hidden or number("intermediate_size"),
        max_seq_len=number("max_position_embeddings"),
        head_dim=number("head_dim", default=128 if family.model_type == "qwen3" else max(1, dim // heads)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(eps),
        qk_norm=bool(family.qk_norm),
        qk_norm_scope="projection" if family.qk_norm == "projection" else "head",
        enable_weight_tying=bool(tied),
        moe=moe,
    )
    if broken:
        raise ConfigError("\n".join(broken))
    return shape


def _rope(config: dict[str, Any], family: Family, where: str, broken: list[str]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before)."""
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = table.get("rope_theta", config.get("rope_theta", family.rope_theta))
    kind = table.get("rope_type", table.get("type", "default"))
    if table.get("partial_rotary_factor", 1) != 1:
        broken.append(
            f"{where}: partial_rotary_factor = {table['partial_rotary_factor']}: {_FIXED['partial_rotary_factor'][1]}"
        )
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        broken.append(f'{where}: rope_type = {shown(kind)}: expected "default" or "llama3"')
        return float(theta), None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in table]
    if missing:
        broken.append(f'{where}: rope_type = "llama3" needs {", ".join(missing)}')
        return float(theta), None
    factor, low, high, length = (table[name] for name in names)
    return float(theta), RopeScaling(float(factor), float(low), float(high), int(length))


def _experts(
    config: dict[str, Any], names: ExpertNames, family: Family, number: Any, where: str, broken: list[str]
) -> MoEShape:
    # transformers 5 has two names for the number of experts and reads either.
    key = next((k for k in ("num_experts", "num_local_experts") if k in config), names.num_experts)
    dense = config.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        broken.append(f"{where}: mlp_only_layers = {shown(dense)}: layers without experts must be the lowest ones")
    return MoEShape(
        num_experts=number(key),
        top_k=number("num_experts_per_tok"),
        hidden_dim=number(names.hidden_dim),
        first_dense_layers=len(dense),
        every_n_layers=number("decoder_sparse_step", default=1),
        route_norm=family.model_type == "mixtral" or bool(config.get("norm_topk_prob", False)),
    )


def hf_config(shape: ModelShape, *, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """config.json of a model of ``shape``, in the names of transformers 4, which 5 reads too.

    Args:
        dtype: of the weights, as torch names it.
        bos_id, eos_id: written in any case: transformers would put in Llama 2's where they are left out.

    Raises:
        ConfigError: the shape is in no family.
    """
    family, moe, scaling = family_of(shape), shape.moe, shape.rope_scaling
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": shape.enable_weight_tying,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": None,
        "torch_dtype": dtype,
    }
    if scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    if family.model_type == "llama":
        config["mlp_bias"] = False
    if family.model_type in ("qwen3", "qwen3_moe"):
        config["use_sliding_window"] = False
    if family.model_type in ("qwen3", "qwen3_moe", "mixtral"):
        config["sliding_window"] = None
    if moe is not None and family.experts is not None:
        config[family.experts.num_experts] = moe.num_experts
        config[family.experts.hidden_dim] = moe.hidden_dim
        config["num_experts_per_tok"] = moe.top_k
        if family.model_type != "mixtral":
            config["norm_topk_prob"] = moe.route_norm
        if family.model_type == "qwen3_moe":
            config["decoder_sparse_step"] = moe.every_n_layers
            config["mlp_only_layers"] = list(range(moe.first_dense_layers))
    return config
