"""Under autocast a model computes in the dtype, and with the roundings, of one whose weights are in it."""

import copy

import pytest
import torch

from config.schema import Moe
from config.shapes import ModelShape, MoEShape
from model.attention import attention_backend
from model.compute_dtype import RMSNorm, compute_dtype
from model.decoder import Decoder

SHAPE = dict(vocab_size=64, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=80, max_seq_len=32, qk_norm=True)
EXPERTS = MoEShape(num_experts=4, top_k=2, hidden_dim=48)


@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "moe"])
def test_autocast_is_as_bfloat16_weights(moe):
    torch.manual_seed(0)
    model = Decoder(ModelShape(**SHAPE, moe=moe), attention_backend("sdpa"), 32, moe=Moe(balance="none"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    narrow = copy.deepcopy(model)
    for name, module in narrow.named_modules():
        if "router" not in name:  # in float32 on every mesh
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    tokens, labels = torch.randint(64, (2, 2, 32)).unbind()
    seen: dict[str, set[torch.dtype]] = {"wide": set(), "narrow": set()}
    for key, of in (("wide", model), ("narrow", narrow)):
        for block in of.layers.values():
            block.register_forward_pre_hook(lambda _, inputs, key=key: seen[key].add(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        found = model(tokens, labels=labels)
    expected = narrow(tokens, labels=labels)
    assert seen == {"wide": {torch.bfloat16}, "narrow": {torch.bfloat16}}
    assert torch.equal(found, expected)
    found.backward()
    expected.backward()
    others = dict(narrow.named_parameters())
    for name, parameter in model.named_parameters():
        gradient, other = parameter.grad, others[name].grad
        assert gradient is not None and other is not None and gradient.dtype == torch.float32
        assert (gradient - other.float()).norm() <= 0.01 * other.float().norm(), name


def test_the_norm_rounds_once_to_its_input_s_dtype():
    norm = RMSNorm(32, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(8, 32)
    assert torch.equal(norm(x), torch.nn.RMSNorm.forward(norm, x))
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x.bfloat16())
        assert norm(x).dtype == torch.float32 and compute_dtype(x) == torch.bfloat16
    wide = torch.nn.functional.rms_norm(x.bfloat16().double(), (32,), norm.weight.bfloat16().double(), 1e-5)
    assert out.dtype == torch.bfloat16 and (out.double() - wide).abs().max() <= 2**-8 * wide.abs().max()
    assert compute_dtype(x) == torch.float32
