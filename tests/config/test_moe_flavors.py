import pytest
import torch

from config.arithmetic import flops_per_token, parameter_counts
from config.flavors import FLAVORS, resolve_shape
from config.schema import Model, Moe
from model.attention import attention_backend
from model.decoder import Decoder

# Total and active parameters that the authors publish (Hugging Face checkpoints), to the last one where they do.
PUBLISHED = {
    "OLMoE-1B-7B": (6_919_161_856, 1.28e9),
    "Mixtral-8x7B": (46_702_792_704, 12.88e9),
    "Qwen3-30B-A3B": (30_532_122_624, 3.35e9),
    "Qwen3-235B-A22B": (235_093_634_560, 22.19e9),
    "moe_7b_a1b": (6_844_127_232, 1.21e9),
}
SPARSE = [name for name, shape in FLAVORS["moe"].items() if shape.moe is not None]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    counts = parameter_counts(FLAVORS["moe"][name])
    assert counts.total == PUBLISHED[name][0]
    assert counts.active == pytest.approx(PUBLISHED[name][1], rel=4e-3)


@pytest.mark.parametrize("name", FLAVORS["moe"])
def test_counts_are_those_of_the_module(name):
    shape = FLAVORS["moe"][name]
    with torch.device("meta"):
        model = Decoder(shape, attention_backend("sdpa"), 16)
    counts = parameter_counts(shape)
    assert counts.total == sum(p.numel() for p in model.parameters())
    if shape.moe is None:
        assert counts.active == counts.total
        return
    idle = 1 - shape.moe.top_k / shape.moe.num_experts
    unused = sum(p.numel() * idle for n, p in model.named_parameters() if ".experts.w" in n)
    assert counts.active == counts.total - round(unused)


@pytest.mark.parametrize("name", SPARSE)
def test_the_dense_twin_has_as_many_active_parameters(name):
    sparse, dense = FLAVORS["moe"][name], FLAVORS["moe"][f"{name}_dense"]
    assert parameter_counts(dense).total == pytest.approx(parameter_counts(sparse).active, rel=1e-2)  # the router
    same = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "max_seq_len", "qk_norm")
    assert all(getattr(sparse, f) == getattr(dense, f) for f in same)
    a, b = flops_per_token(sparse, 2048), flops_per_token(dense, 2048)
    assert a.torchtitan == pytest.approx(b.torchtitan, rel=1e-2)


def test_overrides_of_moe_reach_the_shape():
    shape = resolve_shape(Model(name="moe", flavor="debug_moe"), Moe(num_experts=16, route_norm=True))
    assert shape.moe is not None and (shape.moe.num_experts, shape.moe.top_k, shape.moe.route_norm) == (16, 2, True)
    assert resolve_shape(Model(), Moe(num_experts=16)).moe is None


def test_which_blocks_have_experts():
    deepseek = FLAVORS["moe"]["DeepSeek-V3-16B"].moe
    assert [deepseek.has_experts(i) for i in range(3)] == [False, True, True]
    shape = resolve_shape(Model(name="moe", flavor="debug_moe"), Moe(every_n_layers=2, first_dense_layers=2))
    assert [shape.moe.has_experts(i) for i in range(6)] == [False, False, False, True, False, True]
