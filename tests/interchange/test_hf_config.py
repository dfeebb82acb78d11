"""config.json in and out: published ones give published shapes, and what we cannot do is refused by name."""

import json
from dataclasses import replace

import pytest
import transformers

from config.errors import ConfigError
from config.flavors import FLAVORS, resolve_shape
from config.load import load_file
from config.schema import Moe
from interchange.families import family_of
from interchange.hf_config import hf_config, read_hf_config, shape_of
from interchange.matching import check_same, differences, model_toml

# The architecture part of config.json as published on the Hub, in the names that transformers 4 wrote.
PUBLISHED = {
    ("llama3", "1B"): {
        "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "vocab_size": 128256,
    },
    ("llama3", "8B"): {
        "model_type": "llama", "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "vocab_size": 128256,
    },
    ("qwen3", "0.6B"): {
        "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    ("qwen3", "32B"): {
        "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 25600, "max_position_embeddings": 40960, "max_window_layers": 64,
        "num_attention_heads": 64, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
    ("moe", "Mixtral-8x7B"): {
        "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": None,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    ("moe", "OLMoE-1B-7B"): {
        "model_type": "olmoe", "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 50304,
    },
    ("moe", "Qwen3-30B-A3B"): {
        "model_type": "qwen3_moe", "attention_bias": False, "attention_dropout": 0.0, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
}  # fmt: skip
EXPORTABLE = [
    (name, flavor)
    for name, flavors in FLAVORS.items()
    for flavor in flavors
    if not flavor.startswith(("debug_moe", "DeepSeek")) and flavor != "OLMoE-1B-7B_dense"
]


def refused(change: dict, base=("llama3", "8B")) -> str:
    with pytest.raises(ConfigError) as caught:
        shape_of(PUBLISHED[base] | change, "config.json")
    return str(caught.value)


@pytest.mark.parametrize("flavor", PUBLISHED, ids=str)
def test_published_configurations_are_the_flavors(flavor):
    name, size = flavor
    shape = shape_of(PUBLISHED[flavor], "config.json")
    assert shape == FLAVORS[name][size]
    toml = model_toml(shape)
    assert f'name = "{name}"\nflavor = "{size}"\n' in toml and toml.count("=") == 2


@pytest.mark.parametrize("flavor", EXPORTABLE, ids=str)
def test_a_shape_comes_back_and_transformers_understands_it(flavor, tmp_path):
    shape = FLAVORS[flavor[0]][flavor[1]]
    config = hf_config(shape, dtype="float32", bos_id=None, eos_id=7)
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = read_hf_config(tmp_path)
    assert not list(differences(again, shape)) and again.max_seq_len == shape.max_seq_len
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (theirs.hidden_size, theirs.head_dim, theirs.tie_word_embeddings) == (
        shape.dim, shape.head_dim, shape.enable_weight_tying,
    )  # fmt: skip
    assert theirs.rope_parameters["rope_theta"] == shape.rope_theta
    assert theirs.rope_parameters["rope_type"] == ("llama3" if shape.rope_scaling else "default")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (None, 7)
    assert getattr(theirs, "sliding_window", None) is None
    # What transformers 5 writes itself, in its own names, is read too.
    theirs.save_pretrained(tmp_path / "theirs")
    assert not list(differences(read_hf_config(tmp_path / "theirs"), shape))
    # And the TOML of it is the shape again.
    (tmp_path / "model.toml").write_text(model_toml(shape) + "\n[training]\nseq_len = 128\n")
    loaded = load_file(tmp_path / "model.toml", {"data.tokenizer": "bytes"}).config
    assert not list(differences(resolve_shape(loaded.model, loaded.moe), shape))


@pytest.mark.parametrize(
    ("change", "base", "part"),
    [
        ({"model_type": "gemma3"}, ("llama3", "8B"), 'model_type = "gemma3": not supported; known: "llama"'),
        ({"hidden_act": "gelu"}, ("llama3", "8B"), 'hidden_act = "gelu": feed-forward layers are SwiGLU'),
        ({"attention_bias": True}, ("qwen3", "0.6B"), "attention_bias = true: linear layers have no bias"),
        ({"mlp_bias": True}, ("llama3", "8B"), "mlp_bias = true"),
        ({"attention_dropout": 0.1}, ("llama3", "8B"), "attention_dropout = 0.1: there is no dropout"),
        ({"clip_qkv": 8.0}, ("moe", "OLMoE-1B-7B"), "clip_qkv = 8.0"),
        ({"quantization_config": {"bits": 4}}, ("llama3", "8B"), "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 4096}, ("qwen3", "0.6B"), "sliding_window = 4096"),
        ({"sliding_window": 4096}, ("moe", "Mixtral-8x7B"), "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ("qwen3", "0.6B"), 'holds "sliding_attention"'),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ("qwen3", "0.6B"), 'rope_type = "yarn"'),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, ("llama3", "8B"), "needs low_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ("llama3", "8B"), "partial_rotary"),
        ({"mlp_only_layers": [3]}, ("moe", "Qwen3-30B-A3B"), "mlp_only_layers = [3]"),
        ({"num_attention_heads": None}, ("llama3", "8B"), "num_attention_heads = unset: expected a whole number"),
        ({"rms_norm_eps": None}, ("llama3", "8B"), "rms_norm_eps"),
    ],
)
def test_what_a_shape_cannot_say_is_refused_by_name(change, base, part):
    assert part in refused(change, base)


def test_absent_keys_mean_what_they_mean_to_transformers():
    """Older folders leave out what has its default."""

    def without(base, *keys):
        return shape_of({key: value for key, value in PUBLISHED[base].items() if key not in keys}, "config.json")

    llama = without(("llama3", "8B"), "tie_word_embeddings", "num_key_value_heads", "head_dim")
    assert not llama.enable_weight_tying and llama.n_kv_heads == llama.n_heads == 32 and llama.head_dim == 128
    olmoe = without(("moe", "OLMoE-1B-7B"), "norm_topk_prob", "rope_theta")
    assert olmoe.moe is not None and not olmoe.moe.route_norm and olmoe.rope_theta == 10_000.0
    assert without(("moe", "Mixtral-8x7B"), "norm_topk_prob").moe.route_norm
    with pytest.raises(ConfigError, match="rms_norm_eps = unset"):  # families differ in it
        without(("llama3", "8B"), "rms_norm_eps")


def test_every_reason_is_given_at_once():
    assert len(refused({"hidden_act": "gelu", "mlp_bias": True}).splitlines()) == 2


def test_a_folder_without_a_configuration_is_named(tmp_path):
    with pytest.raises(ConfigError, match="config.json: No such file"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: is not JSON"):
        read_hf_config(tmp_path)


MOE = FLAVORS["moe"]["moe_7b_a1b"]


@pytest.mark.parametrize(
    ("shape", "moe", "part"),
    [
        (FLAVORS["moe"]["debug_moe"], Moe(), "moe.route_norm = false without query norms"),
        (FLAVORS["moe"]["OLMoE-1B-7B_dense"], Moe(), "one query norm over all heads"),
        (FLAVORS["moe"]["DeepSeek-V3-16B"], Moe(), 'moe.score_func = "sigmoid"'),
        (MOE, Moe(balance="bias_sign"), 'moe.balance = "bias_sign"'),
        (MOE, Moe(balance="forced_uniform"), 'moe.balance = "forced_uniform"'),
        (MOE, Moe(routing="expert_choice"), 'moe.routing = "expert_choice"'),
        (MOE, Moe(capacity="score"), 'moe.capacity = "score"'),
        (replace(MOE, moe=replace(MOE.moe, num_shared_experts=1)), Moe(), "moe.num_shared_experts = 1"),
        (replace(MOE, moe=replace(MOE.moe, route_scale=2.0)), Moe(), "moe.route_scale = 2.0"),
        (replace(MOE, qk_norm_scope="projection", moe=replace(MOE.moe, every_n_layers=2)), Moe(), "every_n_layers = 2"),
        (replace(FLAVORS["llama3"]["debug"], dim=130, head_dim=32), Moe(), "model.dim = 130 is not divisible"),
    ],
)
def test_models_that_no_family_has_are_refused_by_name(shape, moe, part):
    with pytest.raises(ConfigError) as caught:
        family_of(shape, moe)
    assert part in str(caught.value)


def test_a_folder_of_another_model_is_refused_key_by_key():
    there, here = FLAVORS["qwen3"]["0.6B"], FLAVORS["qwen3"]["1.7B"]
    check_same("hf", there, replace(there, max_seq_len=128))
    with pytest.raises(ConfigError) as caught:
        check_same("hf", there, here)
    message = str(caught.value)
    assert "model.dim is 1024 there, 2048 in this configuration" in message and "model.hidden_dim is 3072" in message


def test_a_scaling_without_a_key_is_named():
    shape = shape_of(PUBLISHED["llama3", "1B"], "config.json")
    with pytest.raises(ConfigError, match="No flavor .* has model.rope_scaling"):
        model_toml(replace(shape, rope_scaling=replace(shape.rope_scaling, factor=16.0)))
