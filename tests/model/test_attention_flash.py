"""The flash-attn packages by their contract: their documented signatures stand in for them on a CPU."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from config.flavors import ModelShape
from model.attention import attention_backend
from model.attention_blocks import ReferenceBlocks
from model.decoder import Decoder
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from tests.model.flash_packages import stand_ins

NAMES = ("flash2", "flash4")
IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 1 + [1] * 4 + [2] * 7], dtype=torch.int32)
STARTS = torch.tensor([[0, 5, 12, 12], [0, 1, 5, 12]], dtype=torch.int32)


@pytest.fixture
def called():
    with stand_ins() as calls:
        yield calls


def inputs(kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(kv_heads)
    return [
        torch.randn(2, 12, heads, 8, generator=generator).to(dtype).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]


def run(attend, leaves):
    out = attend(*leaves)
    weight = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


def agree(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("documents", ["none", "ids", "ids and starts"])
def test_forward_and_backward_equal_the_math_backend(called, name, kv_heads, documents):
    backend, math = attention_backend(name), attention_backend("sdpa_math")
    ids = None if documents == "none" else IDS
    mask = backend.prepare(ids, STARTS if documents == "ids and starts" else None)
    found = run(lambda q, k, v: backend(q, k, v, mask), inputs(kv_heads))
    agree(found, run(lambda q, k, v: math(q, k, v, math.prepare(ids)), inputs(kv_heads)))
    assert called == (["forward", "backward"] if ids is None else ["varlen forward", "varlen backward"])


def test_bounds_are_the_documents_of_all_rows_one_after_the_other():
    documents = attention_backend("flash4").prepare(IDS, STARTS)
    assert documents.bounds.tolist() == [0, 5, 12, 12, 12, 13, 17, 24, 24]
    assert documents.bounds.dtype == torch.int32 and documents.longest == 12
    assert attention_backend("flash4").prepare(IDS).bounds.tolist() == [0, 5, 12, 12, 13, 17, 24]


def test_padding_of_the_starts_changes_nothing(called):
    backend = attention_backend("flash2")
    wide = torch.nn.functional.pad(STARTS, (0, 4), value=12)
    with torch.no_grad():
        a, b = (backend(*inputs(), backend.prepare(IDS, starts)) for starts in (STARTS, wide))
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_algorithms_reach_the_package(called, name):
    torch.use_deterministic_algorithms(True)
    try:
        run(lambda q, k, v: attention_backend(name)(q, k, v, None), inputs())
    finally:
        torch.use_deterministic_algorithms(False)
    assert called == ["forward", "backward deterministic"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("documents", [False, True])
def test_compiled_is_one_graph_with_equal_gradients(called, name, documents):
    backend = attention_backend(name)
    torch._dynamo.reset()

    def scaled(q, k, v, mask):
        return backend(q * 2.0, k, v, mask) + 1.0

    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for starts in (STARTS, torch.nn.functional.pad(STARTS, (0, 4), value=12)):  # more documents: no new graph
        mask = backend.prepare(IDS, starts) if documents else None
        agree(
            run(lambda q, k, v, mask=mask: compiled(q, k, v, mask), inputs()),
            run(lambda q, k, v, mask=mask: scaled(q, k, v, mask), inputs()),
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1


@pytest.mark.parametrize("name", NAMES)
def test_blocks_equal_the_reference_blocks_and_take_the_row_s_lse(called, name):
    q, k, v = (x.detach() for x in inputs())
    blocks, reference = attention_backend(name).blocks, ReferenceBlocks()
    for causal, keys in ((True, slice(0, 12)), (False, slice(0, 5))):
        found = blocks.forward(q, k[:, keys], v[:, keys], causal, None)
        expected = reference.forward(q, k[:, keys], v[:, keys], causal, None)
        agree(found, expected)
        lse = expected[1] + 0.5  # as if there were other blocks
        arguments = (torch.ones_like(q), q, k[:, keys], v[:, keys], expected[0], lse, causal, None)
        agree(blocks.backward(*arguments), reference.backward(*arguments))
    assert not blocks.masks
    with pytest.raises(ValueError, match="takes no mask"):
        blocks.forward(q, k, v, True, torch.ones(2, 12, 12, dtype=torch.bool))


@pytest.mark.parametrize("name", NAMES)
def test_shapes_on_the_fake_device_are_those_of_the_kernel(called, name):
    q, k, v = (x.detach() for x in inputs())
    namespace = torch.ops.ablation_trainer
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    bounds = torch.tensor([0, 5, 24], dtype=torch.int32)
    for arguments in ((q, k, v, None, 0, True), (*flat, bounds, 19, True)):
        torch.library.opcheck(getattr(namespace, f"{name}_forward").default, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "mode, option, forwards", [("none", "", 2), ("full", "", 4), ("selective", "op", 2), ("selective", "2", 3)]
)
def test_under_checkpointing(called, name, mode, option, forwards):
    """Two layers: "op" keeps the kernel's result, the others run it again in the blocks they recompute."""
    shape = ModelShape(vocab_size=16, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=32, max_seq_len=12)
    tokens = torch.arange(24).view(2, 12) % 16

    def gradients(backend: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Decoder(shape, attention_backend(backend), 12)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        if backend == name and mode != "none":
            apply_activation_checkpoint(model, mode=mode, selective_ac_option=option)
        model(tokens, document_ids=IDS, document_starts=STARTS).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    agree(gradients(name), gradients("sdpa_math"))
    assert called.count("varlen forward") == forwards and called.count("varlen backward") == 2


def test_plain_checkpoint_recomputes(called):
    backend = attention_backend("flash4")
    run(lambda q, k, v: checkpoint(lambda *x: backend(*x, None), q, k, v, use_reentrant=False), inputs())
    assert called == ["forward", "forward", "backward"]
