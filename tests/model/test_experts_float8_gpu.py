"""Experts in float8 on a Hopper GPU: casts against the readable ones, products against emulation, all against both."""

import functools

import pytest
import torch

from model.experts import loop_experts
from model.experts_float8 import float8_experts
from model.float8_casts import FLOAT8, cast_columns, cast_matrices, cast_rows, cast_swiglu, cast_swiglu_backward
from model.grouped_products import scaled_grouped_mm
from model.permute import pad_plan, plan_rows
from tests.model.test_experts import relative, run
from tests.model.test_experts_float8 import NAMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
RECIPES = pytest.mark.parametrize("in_float8", [True, False], ids=["rowwise", "rowwise_with_gw_hp"])
EXPERTS = 8
SHARES = {
    "even": [1.0] * 8,
    "skewed": [60.0, 20.0, 8.0, 4.0, 2.0, 1.0, 0.2, 0.01],
    "empty": [0.0, 1.0, 0.0, 0.0, 3.0, 1.0, 0.0, 0.0],
}


def example(load: str, tokens: int = 3000, dim: int = 512, hidden: int = 256):
    """bfloat16 on the GPU; fresh numbers each time."""
    share = torch.tensor(SHARES[load])
    experts = torch.multinomial(share.expand(tokens, -1), 2).cuda()
    x = torch.randn(tokens, dim, device="cuda").bfloat16()
    w13 = (torch.randn(EXPERTS, dim, 2 * hidden, device="cuda") * dim**-0.5).bfloat16()
    w2 = (torch.randn(EXPERTS, dim, hidden, device="cuda") * hidden**-0.5).bfloat16()
    return x, experts, torch.rand(tokens, 2, device="cuda"), w13, w2


def same_bits(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(mine.cpu().view(torch.uint8), theirs.cpu().view(torch.uint8))


def dequantised(numbers: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    return numbers.float() * inverse[..., None]


@pytest.mark.parametrize("load", SHARES)
@pytest.mark.parametrize(("dim", "hidden"), [(512, 256), (2048, 1024), (1584, 720)])
def test_kernels_cast_to_the_bit_as_a_cpu_does(load, dim, hidden):
    x, experts, weights, w13, w2 = example(load, tokens=700, dim=dim, hidden=hidden)
    x = x * torch.randn(700, 1, device="cuda").exp()
    plan = pad_plan(plan_rows(experts, EXPERTS), 16)
    ends, token, within = plan.ends.cpu(), plan.token.cpu(), int(plan.ends[-1])
    for mine, theirs in (
        (cast_rows(x, None), cast_rows(x.cpu(), None)),
        (cast_rows(x, plan.token), cast_rows(x.cpu(), token)),
        (cast_matrices(w13), cast_matrices(w13.cpu())),
        (cast_matrices(w2), cast_matrices(w2.cpu())),
    ):
        assert same_bits(mine[0], theirs[0]) and torch.equal(mine[1].cpu(), theirs[1])
    rows = x[torch.randint(0, 700, (len(token),), device="cuda")]
    for given, at in ((rows, None), (x, plan.token)):
        mine = cast_columns(given, plan.ends, at)
        theirs = cast_columns(given.cpu(), ends, None if at is None else token)
        assert same_bits(mine[0][:, :within].contiguous(), theirs[0][:, :within].contiguous())
        assert torch.equal(mine[1].cpu(), theirs[1])


def test_kernels_compute_swiglu_as_a_cpu_does():
    """To a rounding: exponentials differ in their last bits, which a cast may turn into one of its own."""
    _, experts, weights, _, _ = example("skewed", tokens=700)
    plan = pad_plan(plan_rows(experts, EXPERTS), 16)
    rows, within = len(plan.token), int(plan.ends[-1])
    h, grad = torch.randn(rows, 512, device="cuda").bfloat16(), torch.randn(rows, 256, device="cuda").bfloat16()
    padded = torch.nn.functional.pad(weights.flatten(), (0, 1))[:, None]
    assert relative(dequantised(*cast_swiglu(h)), dequantised(*cast_swiglu(h.cpu()))) < 5e-3
    mine = cast_swiglu_backward(h, grad, padded, plan.slot, plan.ends)
    theirs = cast_swiglu_backward(h.cpu(), grad.cpu(), padded.cpu(), plan.slot.cpu(), plan.ends.cpu())
    assert relative(mine[0][:within], theirs[0][:within]) < 2e-3
    assert relative(mine[1][:within], theirs[1][:within]) < 2e-3
    assert relative(mine[2][:-1], theirs[2][:-1]) < 1e-5
    cast = [dequantised(both[3][:within], both[4][:within]) for both in (mine, theirs)]
    assert relative(*cast) < 5e-3


@pytest.mark.parametrize("load", SHARES)
@pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact sums"])
def test_products_equal_their_emulation(load, fast):
    x, experts, _, w13, w2 = example(load)
    plan = pad_plan(plan_rows(experts, EXPERTS), 16)
    within, ends = int(plan.ends[-1]), plan.ends
    product = functools.partial(scaled_grouped_mm, ends=ends, dtype=torch.bfloat16, fast=fast)
    numbers, inverse = cast_matrices(w13)
    operands = *cast_rows(x, plan.token), numbers.transpose(-2, -1), inverse
    mine, theirs = product(*operands, emulate=False), product(*operands, emulate=True)
    assert mine.dtype == torch.bfloat16 and relative(mine[:within], theirs[:within]) < 5e-3
    rows = torch.randn(len(plan.token), 256, device="cuda").bfloat16()
    numbers, inverse = cast_columns(rows, ends, None)
    operands = *cast_columns(x, ends, plan.token), numbers.t(), inverse
    mine, theirs = product(*operands, emulate=False), product(*operands, emulate=True)
    for e in range(EXPERTS):
        if (experts == e).any():
            assert relative(mine[e], theirs[e]) < 1e-2, e
        else:
            assert not mine[e].any(), "an expert with padding alone has exactly no gradient"


@pytest.mark.parametrize("load", ["even", "skewed"])
def test_the_product_is_that_of_torchao(load):
    """Its whole chain: casts, scales and kernel, forward and to the input and the matrix."""
    torchao = pytest.importorskip("torchao.prototype.moe_training.fp8_grouped_mm")
    x, experts, _, w13, _ = example(load)
    plan = pad_plan(plan_rows(experts, EXPERTS), 16)
    within, ends = int(plan.ends[-1]), plan.ends
    rows = torch.nn.functional.pad(x, (0, 0, 0, 1))[plan.token][:within].requires_grad_()
    matrix = w13.transpose(-2, -1).contiguous().transpose(-2, -1).requires_grad_()  # by columns in memory
    theirs = torchao._to_fp8_rowwise_then_scaled_grouped_mm(rows, matrix, ends, pad_token_groups_for_grouped_mm=False)
    grad = torch.randn_like(theirs)
    theirs.backward(grad)
    product = functools.partial(scaled_grouped_mm, ends=ends, dtype=torch.bfloat16, emulate=False)
    numbers, inverse = cast_matrices(w13)
    mine = product(*cast_rows(rows.detach(), None), numbers.transpose(-2, -1), inverse)
    assert relative(mine, theirs.detach()) < 2e-3
    numbers, inverse = cast_rows(w13.flatten(0, 1), None)
    turned = numbers.view_as(w13).transpose(-2, -1), inverse.view(EXPERTS, -1)
    assert relative(product(*cast_rows(grad, None), *turned), rows.grad) < 2e-3
    numbers, inverse = cast_columns(grad, ends, None)
    of_matrix = product(*cast_columns(rows.detach(), ends, None), numbers.t(), inverse)
    assert relative(of_matrix, matrix.grad) < 5e-3


@RECIPES
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("load", SHARES)
def test_the_whole_network(load, compiled, in_float8):
    """Against emulation, whose rounding of products to bfloat16 is the same but for the order of sums; and against
    float32, as far as the format is.
    """
    torch._dynamo.reset()
    x, experts, weights, w13, w2 = example(load)
    kernel = functools.partial(float8_experts, matrices_in_float8=in_float8)
    found = run(torch.compile(kernel) if compiled else kernel, x, experts, weights, w13, w2)
    emulated = run(functools.partial(kernel, emulate=True), x, experts, weights, w13, w2)
    exact = run(loop_experts, x.float(), experts, weights, w13.float(), w2.float())
    for name, mine, same, theirs in zip(NAMES, found, emulated, exact, strict=True):
        assert torch.isfinite(mine).all(), name
        assert relative(mine, same) < 2e-2, name
        assert 0.02 < relative(mine, theirs) < 0.09, name
    for expert in range(EXPERTS):
        here = bool((experts == expert).any())
        assert bool(found[3][expert].any()) == here and bool(found[4][expert].any()) == here


@RECIPES
def test_nothing_waits_for_the_device(in_float8):
    kernel = functools.partial(float8_experts, matrices_in_float8=in_float8)
    x, experts, weights, w13, w2 = example("skewed")
    leaves = [t.requires_grad_() for t in (x, weights, w13, w2)]
    grad = torch.randn_like(x)
    for mode in ("default", "error"):  # kernels compile at the first pass
        torch.cuda.set_sync_debug_mode(mode)
        try:
            kernel(leaves[0], experts, *leaves[1:]).backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_more_than_two_to_the_31_numbers():
    """Rows x width beyond int32, in the cast that transposes and in the one that does not."""
    rows, width = 600_000, 4096
    x = torch.randn(1, width, device="cuda").bfloat16().expand(rows, -1).contiguous()
    ends = torch.tensor([16, rows - 16, rows], dtype=torch.int32, device="cuda")
    numbers, inverse = cast_rows(x, None)
    assert same_bits(numbers[-1], cast_rows(x[:1], None)[0][0]) and bool((inverse == inverse[0]).all())
    del numbers
    numbers, inverse = cast_columns(x, ends, None)
    assert torch.equal(inverse[0], inverse[2]) and same_bits(numbers[:, -1].contiguous(), numbers[:, 0].contiguous())
    assert numbers.dtype == FLOAT8
