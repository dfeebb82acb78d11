"""OLMoE, Mixtral and Qwen3-MoE of Hugging Face transformers with our weights give our logits and gradients."""

from dataclasses import replace

import pytest
import torch

from config.flavors import FLAVORS
from config.schema import Moe
from model.attention import attention_backend
from model.decoder import Decoder

transformers = pytest.importorskip("transformers")

SMALL = dict(vocab_size=61, dim=48, n_layers=2, n_heads=4, hidden_dim=64, max_seq_len=64)


def ours(flavor: str, n_kv_heads: int, head_dim: int) -> Decoder:
    """The published shape made small: what it does is kept, how large it is not."""
    shape = FLAVORS["moe"][flavor]
    moe = replace(shape.moe, num_experts=6, top_k=2, hidden_dim=20)
    shape = replace(shape, **SMALL, n_kv_heads=n_kv_heads, head_dim=head_dim, moe=moe)
    model = Decoder(shape, attention_backend("sdpa_math"), 64, Moe(balance="none", experts="grouped_mm"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + (p.dim() == 1))
    return model.double()


def theirs(model: Decoder, name: str, **extra):
    shape = model.shape
    config = getattr(transformers, f"{name}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        max_position_embeddings=64,
        rope_theta=shape.rope_theta,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=False,
        pad_token_id=None,  # else that row of the embedding gets no gradient
        eos_token_id=None,
        num_experts_per_tok=shape.moe.top_k,
        attn_implementation="eager",
        experts_implementation="eager",  # its grouped products do not take float64
        **extra,
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": shape.rope_theta}
    peer = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
    mine, sizes = peer.state_dict(), {}
    with torch.no_grad():
        for key, value in copied(model, mine).items():
            assert mine[key].shape == value.shape, key
            mine[key].copy_(value)
            sizes[key] = True
    assert sizes.keys() == mine.keys(), mine.keys() ^ sizes.keys()
    return peer


def copied(model: Decoder, names) -> dict[str, torch.Tensor]:
    """Our weights under the peer's names; expert weights stacked or one by one, as this release of transformers has
    them.
    """
    state = {
        "model.embed_tokens.weight": model.tok_embeddings.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.output.weight,
    }
    for i, block in model.layers.items():
        layer, attention, moe = f"model.layers.{i}", block.attention, block.moe
        for kind in "qkvo":
            state[f"{layer}.self_attn.{kind}_proj.weight"] = getattr(attention, f"w{kind}").weight
        if attention.q_norm is not None:
            state[f"{layer}.self_attn.q_norm.weight"] = attention.q_norm.weight
            state[f"{layer}.self_attn.k_norm.weight"] = attention.k_norm.weight
        state[f"{layer}.input_layernorm.weight"] = block.attention_norm.weight
        state[f"{layer}.post_attention_layernorm.weight"] = block.ffn_norm.weight
        inside = next(n.split(".")[3] for n in names if n.startswith(layer) and n.endswith("gate.weight"))
        state[f"{layer}.{inside}.gate.weight"] = moe.router.gate.weight
        gate, up = moe.experts.w13[..., 0::2].transpose(1, 2), moe.experts.w13[..., 1::2].transpose(1, 2)
        state[f"{layer}.{inside}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        state[f"{layer}.{inside}.experts.down_proj"] = moe.experts.w2
    return state


@pytest.mark.parametrize(
    "flavor, name, n_kv_heads, head_dim, extra",
    [
        ("OLMoE-1B-7B", "Olmoe", 4, 12, dict(num_experts=6, intermediate_size=20, norm_topk_prob=False)),
        ("Mixtral-8x7B", "Mixtral", 2, 12, dict(num_local_experts=6, intermediate_size=20, sliding_window=None)),
        (
            "Qwen3-30B-A3B", "Qwen3Moe", 2, 16,
            dict(num_experts=6, moe_intermediate_size=20, norm_topk_prob=True, head_dim=16, decoder_sparse_step=1),
        ),
    ],
)  # fmt: skip
def test_logits_and_gradients_equal_transformers(flavor, name, n_kv_heads, head_dim, extra):
    model = ours(flavor, n_kv_heads, head_dim)
    peer = theirs(model, name, **extra)
    tokens = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(1))
    mine, other = model(tokens), peer(tokens).logits
    # transformers takes softmax and normalisation of the router in float32.
    assert float((mine - other).norm() / other.norm()) < 1e-5
    seed = torch.randn(mine.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mine.backward(seed)
    other.backward(seed)
    peer_gate = next(
        p for n, p in peer.named_parameters() if n.startswith("model.layers.1.") and n.endswith("gate.weight")
    )
    pairs = [
        (model.tok_embeddings.weight.grad, peer.model.embed_tokens.weight.grad),
        (model.layers["1"].moe.router.gate.weight.grad, peer_gate.grad),
        (model.layers["0"].attention.wq.weight.grad, peer.model.layers[0].self_attn.q_proj.weight.grad),
    ]
    for a, b in pairs:
        assert float((a - b).norm() / b.norm()) < 1e-4
