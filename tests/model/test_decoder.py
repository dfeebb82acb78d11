import math
from dataclasses import replace

import pytest
import torch

from config.flavors import FLAVORS, ModelShape
from model.attention import attention_backend
from model.decoder import Decoder
from model.initial_weights import draw, initial_value

TINY = ModelShape(vocab_size=97, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=64)


def decoder(shape: ModelShape, positions: int = 64) -> Decoder:
    model = Decoder(shape, attention_backend("sdpa"), positions)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(draw(name, p.shape, initial_value(name, shape), 0, p.device))
    return model


# Published: transformers' num_parameters of the released checkpoints; 1B_untied adds 128,256 x 2,048 to 1B.
PUBLISHED = {
    "1B": 1_235_814_400, "1B_untied": 1_498_482_688, "8B": 8_030_261_248, "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}  # fmt: skip


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_parameter_counts(flavor):
    with torch.device("meta"):
        model = Decoder(FLAVORS["llama3"][flavor], attention_backend("sdpa"), 8)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[flavor]


def test_the_small_flavor_has_the_size_of_its_name():
    with torch.device("meta"):
        model = Decoder(FLAVORS["llama3"]["160M"], attention_backend("sdpa"), 8)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == 162


def test_a_token_sees_its_past_only():
    model = decoder(TINY)
    tokens = torch.randint(0, 97, (2, 20))
    changed = tokens.clone()
    changed[:, 13:] = (changed[:, 13:] + 1) % 97
    a, b = model(tokens), model(changed)
    torch.testing.assert_close(a[:, :13], b[:, :13])
    assert not torch.allclose(a[:, 13:], b[:, 13:])


def test_packed_documents_give_the_logits_of_documents_alone():
    model = decoder(TINY)
    first, second = torch.randint(0, 97, (1, 9)), torch.randint(0, 97, (1, 14))
    packed = model(
        torch.cat([first, second], 1),
        positions=torch.cat([torch.arange(9), torch.arange(14)])[None],
        document_ids=torch.tensor([[0] * 9 + [1] * 14], dtype=torch.int32),
    )
    torch.testing.assert_close(packed[:, :9], model(first), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[:, 9:], model(second), rtol=1e-4, atol=1e-5)


def test_tied_weights_are_one_parameter_with_both_gradients():
    model = decoder(replace(TINY, enable_weight_tying=True))
    assert "output.weight" not in dict(model.named_parameters())
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    gradient = model.tok_embeddings.weight.grad
    assert (gradient.norm(dim=1) > 0).all()  # rows of absent tokens have the head's gradient


def test_qk_norm_adds_a_norm_a_head():
    model = decoder(replace(TINY, qk_norm=True, head_dim=16))
    assert model.layers["0"].attention.q_norm.weight.shape == (16,)
    assert model(torch.randint(0, 97, (2, 8))).shape == (2, 8, 97)


def test_initial_loss_is_near_that_of_guessing():
    model = decoder(TINY)
    tokens = torch.randint(0, 97, (4, 64))
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert abs(loss.item() - math.log(97)) < 0.7


def test_buffers_after_to_empty_are_those_of_construction():
    with torch.device("meta"):
        model = Decoder(TINY, attention_backend("sdpa"), 64)
    model.to_empty(device="cpu")
    model.rope.fill_(float("nan"))
    model.init_buffers()
    torch.testing.assert_close(model.rope, decoder(TINY).rope)
