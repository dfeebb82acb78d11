"""Liger's kernels: interpreted on a CPU, and in what they are given to; on a GPU as they are."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model.liger as liger
from config.flavors import ModelShape
from config.loss import loss_peak_bytes
from config.schema import Config
from model.attention import attention_backend
from model.decoder import Decoder
from model.loss import IGNORE, HeadLoss
from model.loss_choice import loss_of
from model.loss_liger import LigerFusedLinear
from model.rope import rope_frequencies, rope_table, rotate

SHAPE = ModelShape(
    vocab_size=1000, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=512, max_seq_len=128
)


def test_every_kernel_equals_plain_operators_when_interpreted():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.model.liger_interpreted"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = dict(line.split("\t") for line in done.stdout.splitlines())
    assert len(errors) == 14 + 24 + 13
    assert {name: e for name, e in errors.items() if not float(e) < 1e-6} == {}


def test_each_switch_replaces_its_own_kernel_and_keeps_names():
    with torch.device("meta"):
        plain = Decoder(SHAPE, attention_backend("sdpa"), 8)
        model = Decoder(SHAPE, attention_backend("sdpa"), 8)
    liger.use_liger(model, rms_norm=True)
    assert {type(m) for m in model.modules() if isinstance(m, nn.RMSNorm)} == {liger.LigerRMSNorm}
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    block = model.layers["0"]
    assert block.attention.rotate is rotate
    liger.use_liger(model, rope=True)
    assert block.attention.rotate is liger.rotate and block.feed_forward.gated is not liger.gated
    liger.use_liger(model, swiglu=True)
    assert block.feed_forward.gated is liger.gated


def on_gpu(function, *inputs):
    copies = [x.detach().cuda().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = function(*copies)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator("cuda").manual_seed(1)
    sum((x.float() * torch.randn(x.shape, generator=generator, device="cuda")).sum() for x in outputs).backward()
    return [*outputs, *(x.grad for x in copies if x.requires_grad)]


def check(ours, plain, *inputs):
    """Both in the inputs' dtype, and ours no further from float64 than twice the plain one."""
    exact = on_gpu(plain, *(x.double() if x.is_floating_point() else x for x in inputs))
    for mine, theirs, true in zip(on_gpu(ours, *inputs), on_gpu(plain, *inputs), exact, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        error, of_plain = (float((x.double() - true).norm() / true.norm()) for x in (mine, theirs))
        assert error <= max(2 * of_plain, 1e-6), (error, of_plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_kernels_on_a_gpu(dtype):
    def of_weight(function):
        return lambda x, w: function(x, w, 1e-5)

    plain = of_weight(lambda x, w, eps: F.rms_norm(x, (x.shape[-1],), w, eps))
    for shape in ((3, 77, 2048), (4, 4096, 16, 128)):  # the second takes Liger's kernel of many short rows
        x, w = torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)
        check(of_weight(liger.rms_norm), plain, x, w)
    table = rope_table(80, rope_frequencies(128, 5e5, None)).cuda()
    q, k = torch.randn(2, 80, 6, 128, dtype=dtype), torch.randn(2, 80, 2, 128, dtype=dtype)
    for rows in (table, table[torch.randint(0, 80, (2, 80), device="cuda")]):
        check(lambda q, k, rows=rows: liger.rotate(q, k, rows), lambda q, k, rows=rows: rotate(q, k, rows), q, k)
    gate, up = torch.randn(2, 77, 1500, dtype=dtype), torch.randn(2, 77, 1500, dtype=dtype)
    check(liger.gated, lambda a, b: F.silu(a) * b, gate, up)


LOSSES = ["torch", "row_chunked", "vocab_chunked", "liger_cross_entropy", "liger_fused_linear"]


def loss_named(name: str, **options) -> HeadLoss:
    config = Config()
    config.loss.implementation = name
    config.loss.rows_per_chunk, config.loss.columns_per_chunk = 500, 3000
    for key, value in options.items():
        setattr(config.loss, key, value)
    return loss_of(config)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 5.0, "z_loss_coeff": 1e-2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_on_a_gpu(name, dtype, options, compiled):
    hidden, weight = torch.randn(2, 700, 256, dtype=dtype), 0.2 * torch.randn(10_001, 256, dtype=dtype)
    labels = torch.randint(0, 10_001, (2, 700))
    labels[0, 100:650] = IGNORE
    ours = loss_named(name, **options)
    if compiled:
        ours.compile(torch.compile)
    exact = [x.double() for x in (hidden, weight)]
    found = []
    rounded, plain = (hidden, weight), HeadLoss(**options)
    for loss, (h, w) in ((ours, rounded), (plain, rounded), (plain, exact)):
        h, w = h.cuda().requires_grad_(), w.cuda().requires_grad_()
        value = loss(h, w, labels.cuda())
        (value / 850).backward()
        found.append((value.detach(), h.grad, w.grad))
    for i, (mine, theirs, true) in enumerate(zip(*found, strict=True)):
        assert mine.dtype == (torch.float32 if i == 0 else dtype)
        error, of_torch = (float((x.double() - true).norm() / true.norm()) for x in (mine, theirs))
        # The loss is one number, in which the roundings of 850 rows cancel by chance: torch's may happen to be small.
        assert error <= max(2 * of_torch, 5e-5 if i == 0 else 5e-6), (i, error, of_torch)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_peak_on_a_gpu_is_that_of_its_formula(name, compiled):
    """bfloat16, as FSDP2 gathers a head."""
    sizes = {"tokens": 8192, "vocab": 32_000, "dim": 1024}
    loss = loss_named(name)
    if compiled:
        loss.compile(torch.compile)
    hidden = torch.randn(1, sizes["tokens"], sizes["dim"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(sizes["vocab"], sizes["dim"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, sizes["vocab"], (1, sizes["tokens"]), device="cuda")
    for _ in range(2):  # the first compiles
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(hidden, weight, labels).backward()
    peak = torch.cuda.max_memory_allocated() - before
    chunk = {"row_chunked": 500, "vocab_chunked": 3000}.get(name, 1)
    formula = loss_peak_bytes(name, **sizes, chunk=chunk, compiled=compiled)
    print(f"{name} compiled={compiled}: {peak / 2**20:.0f} MiB, formula {formula / 2**20:.0f}")
    assert peak == pytest.approx(formula, rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_all_of_liger_trains_as_one_without(compiled):
    torch.manual_seed(0)
    plain = Decoder(SHAPE, attention_backend("sdpa"), 128).cuda()
    ours = Decoder(SHAPE, attention_backend("sdpa"), 128, loss=LigerFusedLinear()).cuda()
    liger.use_liger(ours, rms_norm=True, rope=True, swiglu=True)
    ours.cuda()
    for model in (plain, ours):
        torch.manual_seed(3)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.ones_like(p) if p.ndim == 1 else 0.05 * torch.randn_like(p))
        model.init_buffers()
        if compiled:
            for block in model.layers.children():
                block.compile(fullgraph=True)
    tokens, labels = torch.randint(0, 1000, (2, 2, 128), device="cuda")
    found = []
    for model in (plain, ours):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens, labels=labels)
        (loss / 256).backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 0.03
