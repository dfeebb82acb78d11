"""Every attention backend on a GPU against float64: forward and gradients, causal and packed, whole and in blocks.

A kernel's relative L2 error in bfloat16 must be below 1e-2, and no more than twice that of plain operators in bfloat16.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from config.attention import KERNELS
from config.flavors import ModelShape
from model.attention import attention_backend
from model.attention_blocks import ReferenceBlocks
from model.attention_choice import machine
from model.decoder import Decoder
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NAMES = [name for name in KERNELS if name != "sdpa_math"]
MASKED = [name for name in NAMES if KERNELS[name].document_mask]
BLOCKWISE = [name for name in NAMES if KERNELS[name].blocks]
HEADS = 8
SHAPES = [(64, HEADS, 512), (64, HEADS // 4, 777), (128, HEADS, 777), (128, HEADS // 4, 512)]
"""Features of a head, key and value heads, length."""
WORST, TIMES_PLAIN = 1e-2, 2.0


@pytest.fixture(autouse=True)
def runs_here(request):
    """Skip where the package is absent or the GPU is another; compile anew for each test."""
    name = request.node.callspec.params["name"]
    first, last = KERNELS[name].capability
    if not first <= machine("cuda").capability <= last:
        pytest.skip(f"{name} needs compute capability {first} to {last}")
    if problem := machine("cuda").missing.get(name):
        pytest.skip(f"{KERNELS[name].package}: {problem}")
    torch._dynamo.reset()


def inputs(length: int, head_dim: int, kv_heads: int, rows: int = 2) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, fresh random numbers in bfloat16."""
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")  # shown if the test fails
    generator = torch.Generator("cuda").manual_seed(seed)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(rows, length, h, head_dim, generator=generator, device="cuda").bfloat16() for h in heads]


def documents(length: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and starts: long documents and short ones in the first row, one document in the second."""
    cuts = torch.tensor([0, 1, 40, length // 3, length // 3 + 1, length - 7])
    first = torch.zeros(length, dtype=torch.int32)
    first[cuts[1:]] = 1
    ids = torch.stack([first.cumsum(0), torch.zeros(length, dtype=torch.long)])[:rows].int()
    starts = torch.full((rows, 8), length, dtype=torch.int32)
    starts[0, : len(cuts)] = cuts.int()
    starts[1:, 0] = 0
    return ids.cuda(), starts.cuda()


def run(attend, tensors, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """Output and gradients of q, k, v."""
    *leaves, dout = (x.to(dtype) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def errors(found, exact) -> list[float]:
    """Relative L2 error of each tensor."""
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, exact, strict=True)]


def check(found, plain, exact) -> None:
    """``found`` is right, and about as exact as plain operators in bfloat16."""
    mine, plainly = errors(found, exact), errors(plain, exact)
    print("out dq dk dv:", [f"{e:.2e}" for e in mine], "plain operators:", [f"{e:.2e}" for e in plainly])
    assert max(mine) < WORST
    assert all(a < TIMES_PLAIN * b for a, b in zip(mine, plainly, strict=True))


def against_math(name: str, tensors: list[torch.Tensor], ids=None, starts=None, wrap=lambda attend: attend) -> None:
    backend, math = attention_backend(name), attention_backend("sdpa_math")
    tokens = torch.zeros(tensors[0].shape[:2], dtype=torch.long, device="cuda")
    mask, plain = backend.prepare(ids, starts, tokens), math.prepare(ids)
    found = run(wrap(lambda q, k, v: backend(q, k, v, mask)), tensors)
    exact = run(lambda q, k, v: math(q, k, v, plain), tensors, torch.float64)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # else its products are float32
    try:
        plainly = run(lambda q, k, v: math(q, k, v, plain), tensors)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    check(found, plainly, exact)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim, kv_heads, length", SHAPES)
def test_causal(name, head_dim, kv_heads, length):
    against_math(name, inputs(length, head_dim, kv_heads))


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("head_dim, kv_heads, length", SHAPES)
def test_documents(name, head_dim, kv_heads, length):
    against_math(name, inputs(length, head_dim, kv_heads), *documents(length))


@pytest.mark.parametrize("name", MASKED)
def test_documents_without_starts(name):
    against_math(name, inputs(300, 64, HEADS), documents(300)[0])


@pytest.mark.parametrize("name", MASKED)
def test_more_documents_than_warps_search(name):
    """Many short documents: kernels for variable lengths look theirs up in another way beyond some number."""
    length, each = 2048, 8
    ids = (torch.arange(length, device="cuda") // each).int().expand(2, -1).contiguous()
    starts = (torch.arange(length // each, device="cuda", dtype=torch.int32) * each).expand(2, -1).contiguous()
    against_math(name, inputs(length, 64, HEADS), ids, starts)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_with_what_is_around_it(name):
    def compiled(attend):
        return torch.compile(lambda q, k, v: attend(q * 2.0, k * 0.5, v) * 1.0, fullgraph=True)

    against_math(name, inputs(512, 128, HEADS // 4), wrap=compiled)


@pytest.mark.parametrize("name", MASKED)
def test_compiled_with_documents(name):
    against_math(name, inputs(512, 128, 2), *documents(512), wrap=lambda attend: torch.compile(attend, fullgraph=True))


@pytest.mark.parametrize("name", NAMES)
def test_under_a_plain_checkpoint(name):
    against_math(
        name, inputs(512, 64, HEADS), wrap=lambda attend: lambda *x: checkpoint(attend, *x, use_reentrant=False)
    )


@pytest.mark.parametrize("name", [n for n in NAMES if KERNELS[n].deterministic and n != "sdpa"])
def test_deterministic_gradients_are_the_same_bits(name):
    tensors = inputs(1024, 128, HEADS // 4)
    ids, starts = documents(1024) if KERNELS[name].document_mask else (None, None)
    backend = attention_backend(name)
    mask = backend.prepare(ids, starts, torch.zeros(2, 1024, dtype=torch.long, device="cuda"))
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run(lambda q, k, v: backend(q, k, v, mask), tensors) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", MASKED)
def test_preparing_and_attending_wait_for_nothing(name):
    tensors, (ids, starts) = inputs(512, 64, HEADS), documents(512)
    backend, tokens = attention_backend(name), torch.zeros(2, 512, dtype=torch.long, device="cuda")

    def once():
        run(lambda q, k, v: backend(q, k, v, backend.prepare(ids, starts, tokens)), tensors)

    once()  # kernels are compiled the first time
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("head_dim, kv_heads", [(64, HEADS), (128, HEADS // 4)])
def test_blocks(name, head_dim, kv_heads):
    """Queries of the second half of a row over two blocks of keys, put together by the log-sum-exp of the whole row."""
    half = 384
    q, k, v, dout = inputs(2 * half, head_dim, kv_heads)
    q, dout = q[:, half:], dout[:, half:]
    kernel, reference = attention_backend(name).blocks, ReferenceBlocks()
    cases = ((False, slice(0, half)), (True, slice(half, 2 * half)))

    def whole_row(blocks, *tensors):
        q, k, v, dout = tensors
        parts = [blocks.forward(q, k[:, keys], v[:, keys], causal, None) for causal, keys in cases]
        lse = torch.logaddexp(parts[0][1], parts[1][1])
        out = sum((its - lse).exp().transpose(1, 2)[..., None] * one.to(its.dtype) for one, its in parts).to(q.dtype)
        grads = [blocks.backward(dout, q, k[:, keys], v[:, keys], out, lse, causal, None) for causal, keys in cases]
        dq = grads[0][0].to(lse.dtype) + grads[1][0].to(lse.dtype)
        return [lse, out, dq, *(torch.cat([grads[0][i], grads[1][i]], dim=1) for i in (1, 2))]

    lse, *found = whole_row(kernel, q, k, v, dout)
    assert lse.dtype == torch.float32 and lse.shape == (2, HEADS, half)
    exact_lse, *exact = whole_row(reference, *(x.double() for x in (q, k, v, dout)))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0.0, atol=2e-3)
    _, *plain = whole_row(reference, q, k, v, dout)
    assert max(errors(found, exact)) < WORST, errors(found, exact)
    print("out dq dk dv:", errors(found, exact), "reference in bfloat16:", errors(plain, exact))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "mode, option, compiled",
    [
        ("none", "", True),
        ("full", "", False),
        ("full", "", True),
        ("selective", "op", False),
        ("selective", "op", True),
    ],
)
def test_gradients_of_a_model(name, packed, mode, option, compiled):
    """Two layers under autocast, with a norm on queries and keys, checkpointed and compiled as a run is."""
    if packed and not KERNELS[name].document_mask:
        pytest.skip(f"{name} knows no document masks")
    shape = ModelShape(
        vocab_size=64, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=256, max_seq_len=256, qk_norm=True
    )
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 256), device="cuda")
    ids, starts = documents(256) if packed else (None, None)
    weights: dict[str, torch.Tensor] = {}

    def gradients(backend: str, dtype: torch.dtype, as_a_run: bool) -> list[torch.Tensor]:
        with torch.device("cuda"):
            model = Decoder(shape, attention_backend(backend), 256).to(dtype)
        for key, parameter in model.named_parameters():
            value = weights.setdefault(key, torch.randn_like(parameter) * 0.06 + (parameter.dim() == 1))
            parameter.data.copy_(value)
        parameters = list(model.parameters())
        if as_a_run and mode != "none":
            apply_activation_checkpoint(model, mode=mode, selective_ac_option=option)
        if as_a_run and compiled:
            apply_compile(model, backend="inductor")
        for _ in range(2):  # the second time with what the first has compiled
            model.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.float32):
                logits = model(tokens, document_ids=ids, document_starts=starts)
            logits = logits.to(dtype).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, tokens.flatten()).backward()
        return [parameter.grad for parameter in parameters]

    exact = gradients("sdpa_math", torch.float64, False)
    mine = errors(gradients(name, torch.float32, True), exact)
    plainly = errors(gradients("sdpa_math", torch.float32, False), exact)
    assert all(a < TIMES_PLAIN * b + WORST for a, b in zip(mine, plainly, strict=True)), (mine, plainly)


@pytest.mark.parametrize("name", ["sdpa"])
def test_causal_grouped_queries_run_a_fused_kernel(name):
    q = torch.randn(1, 1024, 16, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, 1024, 4, 64, dtype=torch.bfloat16, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attention_backend(name)(q, k, k, None)
    kernels = [event.key for event in profile.key_averages()]
    assert any("flash" in kernel or "cudnn" in kernel or "sdpa" in kernel for kernel in kernels), kernels
