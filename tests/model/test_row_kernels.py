"""Kernels that move rows: interpreted on a CPU; on a GPU as they are, in operators, blocks and checkpoints."""

import copy
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from config.errors import ConfigError
from config.schema import Moe
from config.shapes import ModelShape, MoEShape
from model import row_ops, row_reference
from model.experts import loop_experts
from model.experts_grouped import grouped_experts
from model.moe import MoE
from model.permute import plan_rows

TOKENS, EXPERTS = 12, 5
WIDE = {"x", "rows", "grad", "h", "out", "d_h", "active", "gradient"}
"""Arguments of kernels that hold rows of bfloat16."""


@pytest.mark.parametrize(
    ("name", "warps", "constants", "loads", "stores"),
    [
        ("_gather_rows", 8, {"WIDTH": 2048, "ROWS": 4, "BLOCK": 2048}, 4, 4),
        ("_gather_sum", 8, {"WIDTH": 2056, "SLOTS": 8, "WEIGHTED": True, "BLOCK": 2048}, 8, 1),
        ("_swiglu", 4, {"WIDTH": 768, "BLOCK": 1024}, 2, 1),
        ("_swiglu_backward", 4, {"EXPERTS": 64, "WIDTH": 1024, "BLOCK": 1024}, 3, 3),
        ("_zero_empty", 8, {"SIZE": 4096, "PROGRAMS": 64, "BLOCK": 2048}, 0, 1),
    ],
)
def test_kernels_compile_for_hopper_and_move_16_bytes_at_a_time(name, warps, constants, loads, stores):
    """Without a GPU: what a thread loads and stores of rows, at most 8 numbers at once, from the assembly."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from model import row_kernels

    kernel = getattr(row_kernels, name)
    names = kernel.arg_names
    others = {"weights": "*fp32", "d_weights": "*fp32", "ends": "*i32", "count": "i32"}
    types = {n: "constexpr" if n in constants else "*bf16" if n in WIDE else others.get(n, "*i64") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*")}
    values = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(kernel, signature=types, constexprs=values, attrs=aligned)
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    wide = {kind: len(re.findall(rf"{kind}\.global\.v4\.b32", code)) for kind in ("ld", "st")}
    assert wide == {"ld": loads, "st": stores}
    assert not re.findall(r"(?:ld|st)\.global\.(?:v\d\.)?b16", code)


def test_every_kernel_equals_plain_operators_when_interpreted():
    pytest.importorskip("triton")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.model.rows_interpreted"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = {name: float(e) for name, e in (line.split("\t") for line in done.stdout.splitlines())}
    assert len(errors) == 7 * 8

    def most(name: str) -> float:
        if name.startswith(("gather ", "zero_empty ")) or ("float32" in name and name.startswith("gather_sum ")):
            return 0.0
        # The interpreter cuts a bfloat16 off where a GPU rounds: up to 1 in its eighth binary digit.
        return 1e-6 if "float32" in name or "weights" in name else 8e-3

    assert {name: e for name, e in errors.items() if not e <= most(name)} == {}


def example(slots: int = 2, dtype: torch.dtype = torch.float64, width: int = 8, tokens: int = TOKENS):
    experts = torch.rand(tokens, EXPERTS).topk(slots).indices
    experts[torch.rand(experts.shape) < 0.2] = EXPERTS
    plan = plan_rows(experts, EXPERTS)
    weights = torch.rand(experts.shape, dtype=torch.promote_types(dtype, torch.float32)) * (experts < EXPERTS)
    return plan, weights, torch.randn(len(plan.token), width).to(dtype)


def test_operators_are_registered_as_compilers_and_autograd_want_them():
    """Schemas, shapes without data, gradients under tracing."""
    plan, weights, rows = example()
    x = torch.randn(TOKENS, 8, dtype=torch.float64, requires_grad=True)
    rows.requires_grad_()
    h = torch.randn(len(plan.token), 16, dtype=torch.float64)
    d = torch.randn(len(plan.token), 8, dtype=torch.float64)
    for operator, arguments in (
        (row_ops.gather_rows, (x, plan.token, plan.row)),
        (row_ops.gather_sum, (rows, plan.token, plan.row)),
        (row_ops.combine, (rows.detach(), weights, plan.row)),
        (row_ops.swiglu, (h,)),
        (row_ops.swiglu_backward, (h, d, weights.detach(), plan.slot, plan.ends)),
        (row_ops.weight_gradient, (h, d, plan.ends)),
        (row_ops.zero_empty_, (torch.randn(EXPERTS, 8, 16), plan.ends)),
    ):
        torch.library.opcheck(operator, arguments)


def test_results_lie_in_memory_as_compilers_are_told():
    """Also those of inputs that do not: on a CPU the readable functions keep the order of their inputs."""
    plan, weights, rows = example()
    turned = [t.t().contiguous().t() for t in (torch.randn(len(rows), 16).double(), rows, weights)]
    h, d, w = turned
    for operator, arguments in (
        (row_ops.gather_rows, (torch.randn(8, TOKENS).t(), plan.token, plan.row)),
        (row_ops.combine, (d, w, plan.row)),
        (row_ops.swiglu, (h,)),
        (row_ops.swiglu_backward, (h, d, w, plan.slot, plan.ends)),
    ):
        assert not arguments[0].is_contiguous()
        torch.library.opcheck(operator, arguments, test_utils="test_faketensor")
    assert torch.equal(row_ops.swiglu(h), row_ops.swiglu(h.contiguous()))


def test_gradients_are_those_of_autograd():
    plan, weights, _ = example()
    here = plan.row < int(plan.ends[-1])

    def plain(x, rows):
        found = torch.where(here[..., None], rows[plan.row.clamp(max=len(rows) - 1)], 0.0)
        return x[plan.token], found.sum(1)

    def ours(x, rows):
        # A gradient of the plain sum means nothing for rows that no assignment names.
        used = torch.where((torch.arange(len(rows)) < plan.ends[-1])[:, None], rows, 0.0)
        return (
            row_ops.gather_rows(x, plan.token, plan.row),
            row_ops.gather_sum(used, plan.token, plan.row),
        )

    inputs = [torch.randn(TOKENS, 8).double(), torch.randn(len(plan.token), 8).double()]
    scales = [torch.randn(len(plan.token), 8).double(), torch.randn(TOKENS, 8).double()]
    scales[0][int(plan.ends[-1]) :] = 0.0  # gathered rows that go nowhere have no gradient
    found = []
    for function in (plain, ours):
        leaves = [t.clone().requires_grad_() for t in inputs]
        outputs = function(*leaves)
        found.append(
            [*outputs, *torch.autograd.grad(sum((a * s).sum() for a, s in zip(outputs, scales, strict=True)), leaves)]
        )
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs)


def test_swiglu_is_differentiated_as_autograd_does():
    plan, weights, _ = example()
    h = torch.randn(len(plan.token), 16, dtype=torch.float64, requires_grad=True)
    w, grad = weights.requires_grad_(), torch.randn(len(plan.token), 8, dtype=torch.float64)
    used = int(plan.ends[-1])
    active = w.flatten()[plan.slot, None] * row_ops.swiglu(h.detach())
    gate, up = h[:, 0::2], h[:, 1::2]
    by_hand = w.flatten()[plan.slot, None] * torch.nn.functional.silu(gate) * up
    d_h, d_w = torch.autograd.grad((by_hand[:used] * grad[:used]).sum(), (h, w))
    found = row_ops.swiglu_backward(h.detach(), grad, w.detach(), plan.slot, plan.ends)
    torch.testing.assert_close(active, by_hand)
    torch.testing.assert_close(found[0][:used], d_h[:used])
    torch.testing.assert_close(found[1], active)
    torch.testing.assert_close(found[2], d_w)


def test_the_choice_is_checked():
    for name in ("torch", "auto"):
        row_ops.choose_row_kernels(name, "cpu")
    with pytest.raises(ConfigError, match='row_kernels = "triton".*CUDA.*"auto"'):
        row_ops.choose_row_kernels("triton", "cpu")


def test_without_triton_the_readable_functions_run_as_they_are(monkeypatch, caplog):
    monkeypatch.setattr(row_ops, "_triton_is_there", lambda: False)
    monkeypatch.setattr(row_ops, "_choice", "auto")
    monkeypatch.setattr(row_ops, "_compiled", functools.cache(row_ops._compiled.__wrapped__))
    with caplog.at_level("INFO"):
        row_ops.choose_row_kernels("auto", "cuda")
    assert "not compiled" in caplog.text
    assert row_ops._kernels(torch.zeros(1)).swiglu is row_reference.swiglu
    with pytest.raises(ConfigError, match="Triton is not installed"):
        row_ops.choose_row_kernels("triton", "cuda")


# ---- on a GPU


@pytest.fixture(params=["triton", "torch"])
def chosen(request):
    row_ops.choose_row_kernels(request.param, "cuda")
    yield request.param
    row_ops.choose_row_kernels("auto", "cuda")


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots, width", [(1, 2048), (3, 1032), (8, 2048), (16, 264), (20, 64)])
def test_kernels_on_a_gpu_equal_the_readable_functions(slots, width, dtype):
    """Gathers, sums over slots and zeros to the bit, the rest to rounding."""
    from model import row_kernels

    experts = torch.rand(1000, 24).topk(slots).indices
    experts[(experts == 7) | (torch.rand(experts.shape) < 0.1)] = 24
    plan = plan_rows(experts.cuda(), 24)
    used = int(plan.ends[-1])
    weights = torch.rand(experts.shape).cuda() * (experts < 24).cuda()
    rows = torch.randn(len(plan.token), width, device="cuda").to(dtype)
    rows[used:] = torch.nan
    x = torch.randn(1000, width, device="cuda").to(dtype)
    assert torch.equal(row_kernels.gather_rows(x, plan.token), x[plan.token])
    for w in (None, weights):
        mine, plain = (f(rows, plan.row, w) for f in (row_kernels.gather_sum, row_reference.gather_sum))
        assert torch.equal(mine, plain)
    rounding = 1e-6 if dtype == torch.float32 else 2e-3
    h, d = torch.randn(len(rows), 2 * width, device="cuda").to(dtype), torch.randn(len(rows), width).cuda().to(dtype)
    h[used:] = torch.nan
    assert relative(row_kernels.swiglu(h)[:used], row_reference.swiglu(h)[:used]) < rounding
    arguments = (h, d, weights, plan.slot, plan.ends)
    mine, plain = (f(*arguments) for f in (row_kernels.swiglu_backward, row_reference.swiglu_backward))
    assert relative(mine[0][:used], plain[0][:used]) < rounding and relative(mine[1][:used], plain[1][:used]) < rounding
    assert relative(mine[2], plain[2]) < 1e-5
    gradient = torch.randn(24, width, 40, device="cuda").to(dtype)
    mine, plain = (f(gradient.clone(), plan.ends) for f in (row_kernels.zero_empty_, row_reference.zero_empty_))
    assert torch.equal(mine, plain) and not mine[7].any() and mine[6].all(dim=0).any()


def layer() -> MoE:
    shape = ModelShape(
        vocab_size=1, dim=256, n_layers=1, n_heads=1, n_kv_heads=1, hidden_dim=1, max_seq_len=512,
        moe=MoEShape(num_experts=16, top_k=4, hidden_dim=128),
    )  # fmt: skip
    block = MoE(shape, Moe(balance="bias_sign"), noise_seed=0, layer=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    return block.cuda().to(torch.bfloat16)


def passes(block, x):
    x = x.clone().requires_grad_()
    block.zero_grad(set_to_none=True)
    out = block(x)[0]
    out.backward(torch.ones_like(out) * torch.linspace(-1, 1, out.shape[-1], device="cuda").to(out.dtype))
    return [out.detach(), x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.gpu
def test_a_layer_compiles_as_one_graph_and_recomputes(chosen):
    plain = layer()
    x = torch.randn(2, 512, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    eager = passes(plain, x)
    compiled = copy.deepcopy(plain)
    compiled.compile(fullgraph=True)
    again = copy.deepcopy(plain)
    again.forward = functools.partial(checkpoint, again.forward, use_reentrant=False)
    for mine, theirs in zip(passes(again, x), eager, strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(passes(compiled, x), eager, strict=True):
        assert relative(mine, theirs) < 1e-2


@pytest.mark.gpu
def test_experts_are_as_close_to_float64_as_before(chosen):
    generator = torch.Generator().manual_seed(4)
    experts = torch.rand(900, 8, generator=generator).topk(3).indices
    experts[torch.rand(experts.shape, generator=generator) < 0.2] = 8
    weights = torch.rand(experts.shape, generator=generator) * (experts < 8)
    x, grad = torch.randn(2, 900, 256, generator=generator).bfloat16()
    w13 = (torch.randn(8, 256, 256, generator=generator) / 16).bfloat16()
    w2 = (torch.randn(8, 256, 128, generator=generator) / 12).bfloat16()

    def run(kernel, device, dtype):
        leaves = [t.to(device, dtype).requires_grad_() for t in (x, w13, w2)]
        weight = weights.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_()
        out = kernel(leaves[0], experts.to(device), weight, leaves[1], leaves[2], int((experts < 8).sum()))
        out.backward(grad.to(device, dtype))
        return [out.detach(), weight.grad, *(leaf.grad for leaf in leaves)]

    exact = run(loop_experts, "cpu", torch.float64)
    for mine, true in zip(run(grouped_experts, "cuda", torch.bfloat16), exact, strict=True):
        assert torch.isfinite(mine).all() and relative(mine.cpu(), true) < 1e-2
    for mine, true in zip(run(grouped_experts, "cuda", torch.float32), exact, strict=True):
        assert relative(mine.cpu(), true) < 1e-5
    for mine, true in zip(run(grouped_experts, "cuda", torch.float64), exact, strict=True):
        assert relative(mine.cpu(), true) < 1e-12
