"""What the estimate counts of a block is what autograd saves of it."""

import pytest
import torch

from config.saved_tensors import Kernels, Numbers, block, share_within_budget
from config.schema import Moe
from config.shapes import ModelShape, MoEShape
from model.attention import attention_backend
from model.compute_dtype import RMSNorm
from model.decoder import Decoder

SHAPE = dict(vocab_size=64, dim=64, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=160, max_seq_len=128)
TOKENS = 2 * 128


def saved_bytes(model: Decoder, autocast: bool) -> int:
    """Storages, each once, that a pass leaves for the backward pass; weights and their casts, and small ones, apart."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()} | {model.rope.untyped_storage().data_ptr()}
    sizes = {p.numel() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        cast = x.dtype == torch.bfloat16 and storage.nbytes() // 2 in sizes and x.ndim == 2 and x.shape[0] != TOKENS
        if storage.data_ptr() not in weights and not cast:
            kept[storage.data_ptr()] = x
        return x

    tokens = torch.randint(64, (2, 128))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(tokens).float().sum()
    total = sum(x.untyped_storage().nbytes() for x in kept.values())
    loss.backward()
    return total


def of_one_block(autocast: bool, moe: MoEShape | None = None, **changes) -> float:
    """Bytes a token: what a third block adds to two."""
    found = []
    for n_layers in (2, 3):
        torch.manual_seed(0)
        shape = ModelShape(**SHAPE | changes | {"n_layers": n_layers, "moe": moe})
        model = Decoder(shape, attention_backend("sdpa"), 128, moe=Moe(balance="none"))
        found.append(saved_bytes(model, autocast))
    return (found[1] - found[0]) / TOKENS


class _FusedNorm(torch.autograd.Function):
    """What a GPU's kernel saves: its input, one float32 a row, the weight. A CPU runs in parts and saves those."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return (x.float() * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, _, weight = ctx.saved_tensors
        return gradient.to(x.dtype), torch.zeros_like(weight), None


@pytest.fixture(autouse=True)
def fused_norms(monkeypatch):
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: _FusedNorm.apply(x, self.weight, self.eps))


@pytest.mark.parametrize(
    "changes", [{}, {"n_kv_heads": 4, "hidden_dim": 256}, {"qk_norm": True}], ids=["gqa", "mha", "qk_norm"]
)
def test_a_dense_block_in_float32(changes):
    shape = ModelShape(**SHAPE | changes)
    counted = block(shape, Numbers(4), Kernels(), with_experts=False).eager
    assert of_one_block(False, **changes) == pytest.approx(counted, rel=0.001)


def test_a_dense_block_under_autocast():
    shape = ModelShape(**SHAPE)
    counted = block(shape, Numbers(2), Kernels(), with_experts=False).eager
    assert of_one_block(True) == pytest.approx(counted, rel=0.001)


def test_a_block_with_experts():
    moe = MoEShape(num_experts=8, top_k=2, hidden_dim=96)
    shape = ModelShape(**SHAPE, moe=moe)
    counted = block(shape, Numbers(4), Kernels(), with_experts=True).eager
    assert of_one_block(False, moe) == pytest.approx(counted, rel=0.02)


def test_a_memory_budget_under_autocast(monkeypatch):
    """What the partitioner saves of a compiled block under a budget, against what it saves for speed and with none."""
    monkeypatch.undo()  # norms as they are
    shape = ModelShape(**SHAPE | {"dim": 256, "hidden_dim": 896, "n_layers": 1, "max_seq_len": 512})

    def saved(budget: float) -> tuple[int, int]:
        """Bytes that a pass leaves: all but casts of matrices, and those."""
        torch._dynamo.reset()
        monkeypatch.setattr(torch._functorch.config, "activation_memory_budget", budget)
        model = Decoder(shape, attention_backend("sdpa"), 512, moe=Moe(balance="none"))
        model.layers["0"].compile(backend="aot_eager_decomp_partition")
        matrices = {tuple(sorted(p.shape)) for p in model.layers["0"].parameters() if p.ndim == 2}
        held = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in held:
                kept[x.untyped_storage().data_ptr()] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.randint(64, (1, 512)))
        casts = sum(x.untyped_storage().nbytes() for x in kept.values() if tuple(sorted(x.shape)) in matrices)
        return sum(x.untyped_storage().nbytes() for x in kept.values()) - casts, casts

    (least, _), (most, casts) = saved(0.0), saved(1.0)
    assert casts == 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 896)
    for budget in (0.2, 0.5, 0.9):
        found, cast = saved(budget)
        assert cast == 0
        expected = share_within_budget(budget, most - least, casts) * (most - least)
        assert found - least == pytest.approx(expected, rel=0.15), budget
    torch._dynamo.reset()
