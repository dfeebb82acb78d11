"""How often each layer runs: checkpointing buys memory with one more forward pass, and with no more than one."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import titan
from config.flavors import ModelShape
from model.attention import attention_backend
from model.decoder import Decoder
from model.initial_weights import draw, initial_value
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.names import named_parameters, plain_name

LAYERS = 4
SHAPE = ModelShape(vocab_size=97, dim=32, n_layers=LAYERS, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=16)
PRODUCTS = 7
"""Matrix products of a block: queries, keys, values, output, gate, up, down."""


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[function.overloadpacket._qualified_op_name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def run(mode: str, option: str = "2") -> tuple[dict[str, int], Counter[str], dict[str, torch.Tensor]]:
    """One forward and backward pass: runs of each attention layer, operators, gradients."""
    model = Decoder(SHAPE, attention_backend("sdpa"), 16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(draw(name, p.shape, initial_value(name, SHAPE), 0, p.device))
    if mode != "none":
        apply_activation_checkpoint(model, mode=mode, selective_ac_option=option)
    runs: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith(".attention"):
            layer = plain_name(name)
            module.register_forward_pre_hook(lambda *_, layer=layer: runs.update([layer]))
    tokens = torch.arange(32).view(2, 16) * 3 % 97
    with Operators() as operators:
        model(tokens).logsumexp(-1).sum().backward()
    gradients = {name: p.grad for name, p in named_parameters(model) if p.grad is not None}
    return dict(runs), operators.seen, gradients


@pytest.mark.parametrize(
    ("mode", "option", "runs"),
    [
        ("none", "2", [1, 1, 1, 1]),
        ("full", "2", [2, 2, 2, 2]),
        ("selective", "1", [2, 2, 2, 2]),
        ("selective", "2", [2, 1, 2, 1]),
        ("selective", "3", [2, 1, 1, 2]),
    ],
)
def test_a_recomputed_block_runs_exactly_once_more(mode, option, runs):
    seen, operators, gradients = run(mode, option)
    assert [seen[f"layers.{i}.attention"] for i in range(LAYERS)] == runs
    _, plain, expected = run("none")
    again = sum(runs) - LAYERS
    assert operators["mm"] == plain["mm"] + PRODUCTS * again
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


def test_checkpointing_by_operator_recomputes_every_second_product():
    _, operators, gradients = run("selective", "op")
    _, plain, expected = run("none")
    assert operators["mm"] - plain["mm"] == LAYERS * (PRODUCTS // 2)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_checkpointing_by_operator_keeps_what_attention_runs_on_a_gpu(kernel):
    """Else the costliest operator of a long sequence would run twice."""
    kept = titan.SelectiveAC(titan.SelectiveAC.Config()).get_save_ops()
    assert getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default in kept
