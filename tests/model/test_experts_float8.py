"""Experts in float8: what is rounded and how, padding, and kernels against what they stand for.

On a CPU products are emulated: operands are rounded to float8 and multiplied in float32, as tensor cores would.
"""

import functools
import subprocess
import sys

import pytest
import torch

from config.precision_schema import GROUPED
from config.schema import Config
from model import experts_float8
from model.experts import Experts, loop_experts
from model.experts_float8 import float8_experts, use_float8_experts
from model.float8_casts import FLOAT8, cast_columns, cast_matrices, cast_rows, scales
from model.permute import pad_plan, plan_rows
from tests.model.test_experts import poisoned_memory, relative, routed, run, weights_of

__all__ = ["poisoned_memory"]
NAMES = ("out", "x", "weights", "w13", "w2")
RECIPES = pytest.mark.parametrize("in_float8", [True, False], ids=["rowwise", "rowwise_with_gw_hp"])
EXPERTS, DIM, HIDDEN = 6, 64, 48
LOADS = {"all": None, "one": [2], "some": [0, 5]}


def emulated(in_float8: bool):
    return functools.partial(float8_experts, matrices_in_float8=in_float8, emulate=True)


def rounded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """By logarithm and division, in float64: one scale along ``dim``, a power of two."""
    largest = x.double().abs().amax(dim, keepdim=True).clamp(min=1e-30)
    scale = torch.exp2(torch.floor(torch.log2(448 / largest)))
    return (x.double() * scale).to(FLOAT8).double() / scale


def by_hand(x, experts, weights, w13, w2, seed, in_float8: bool) -> list[torch.Tensor]:
    """Output and gradients at the output gradient ``seed``, an expert at a time, in float64."""
    out, d_x, d_weights = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    d_w13, d_w2 = torch.zeros_like(w13), torch.zeros_like(w2)
    round_matrix = rounded if in_float8 else lambda value, dim: value
    for e in range(len(w13)):
        token, slot = torch.where(experts == e)
        if not len(token):
            continue
        rows, g, weight = x[token], seed[token], weights[token, slot, None]
        h = rounded(rows, 1) @ rounded(w13[e], 0)
        gate, up = h[:, 0::2], h[:, 1::2]
        silu = torch.nn.functional.silu(gate)
        y = rounded(silu * up, 1) @ rounded(w2[e], 1).T
        out.index_add_(0, token, weight * y)
        by_active = rounded(g, 1) @ rounded(w2[e], 0)
        d_weights[token, slot] = (by_active * silu * up).sum(1)
        sigmoid = gate.sigmoid()
        d_gate = weight * by_active * up * (sigmoid + silu * (1 - sigmoid))
        d_h = torch.stack([d_gate, weight * by_active * silu], -1).flatten(-2)
        d_x.index_add_(0, token, rounded(d_h, 1) @ rounded(w13[e], 1).T)
        d_w13[e] = round_matrix(rows, 0).T @ round_matrix(d_h, 0)
        d_w2[e] = round_matrix(g, 0).T @ round_matrix(weight * silu * up, 0)
    return [out, d_x, d_weights, d_w13, d_w2]


def example(load: str, tokens: int = 100, dtype: torch.dtype = torch.float32):
    x = torch.randn(tokens, DIM, dtype=torch.float64)
    experts, weights = routed(tokens, 1 if load == "one" else 2, EXPERTS, LOADS[load])
    return x.to(dtype), experts, weights.float(), *weights_of(dtype, "cpu", EXPERTS, DIM, HIDDEN)


@RECIPES
@pytest.mark.parametrize("load", LOADS)
def test_each_operand_is_rounded_as_written_by_hand(load, in_float8):
    """A number in a thousand lies so close to the middle that float32 and float64 round it apart."""
    x, experts, weights, w13, w2 = example(load)
    found = run(emulated(in_float8), x, experts, weights, w13, w2)
    seed = torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).float().double()
    wide = [t.detach().double() for t in (x, weights, w13, w2)]
    exact = by_hand(wide[0], experts, *wide[1:], seed, in_float8)
    for name, mine, theirs in zip(NAMES, found, exact, strict=True):
        assert relative(mine, theirs) < 3e-3, name


@RECIPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("load", LOADS)
def test_as_far_from_exact_products_as_the_format_says(poisoned_memory, load, dtype, in_float8):
    """3 bits after the leading one give 2.5 % an operand; a chain of two products about 6.5 %."""
    x, experts, weights, w13, w2 = example(load, dtype=dtype)
    found = run(emulated(in_float8), x, experts, weights, w13, w2)
    exact = run(loop_experts, *(t.detach().double() if t.is_floating_point() else t for t in (x, experts)),
                weights.double(), w13.detach().double(), w2.detach().double())  # fmt: skip
    for name, mine, theirs in zip(NAMES, found, exact, strict=True):
        assert mine.dtype == (torch.float32 if name == "weights" else dtype)
        assert 0.02 < relative(mine, theirs) < 0.09, name
    for gradient in found[3:]:
        for expert in range(EXPERTS):
            assert bool((gradient[expert] == 0).all()) == (LOADS[load] is not None and expert not in LOADS[load])


def test_a_group_of_one_row_empty_groups_and_rows_that_go_nowhere(poisoned_memory):
    x, _, _, w13, w2 = example("all", tokens=20)
    experts = torch.full((20, 2), EXPERTS)
    experts[4, 1], experts[5:, 0] = 3, 1
    weights = torch.rand(20, 2) * (experts < EXPERTS)
    for bound in (None, 16):
        found = run(emulated(True), x, experts, weights, w13, w2, bound)
        exact = run(loop_experts, x, experts, weights, w13, w2)
        assert not found[0][:4].any() and not found[1][:4].any()
        assert not found[2][experts == EXPERTS].any()
        for name, mine, theirs in zip(NAMES, found, exact, strict=True):
            # A weight's gradient is one product of two rows, most of which cancels.
            assert relative(mine, theirs) < (0.25 if name == "weights" else 0.09), name


@pytest.mark.parametrize("load", LOADS)
def test_padding_changes_nothing(monkeypatch, load):
    inputs = example(load)
    padded = run(emulated(True), *inputs)
    monkeypatch.setattr(experts_float8, "MULTIPLE", 1)
    for mine, theirs in zip(padded, run(emulated(True), *inputs), strict=True):
        assert relative(mine, theirs) < 1e-3, "sums of other lengths round apart, and few numbers then to float8"


@RECIPES
@pytest.mark.parametrize("load", LOADS)
def test_a_kernel_is_given_what_the_emulation_does_not_need(monkeypatch, load, in_float8):
    """Groups of whole sixteens, none empty, and float32 sums over rows, which have no bound."""
    given, product = [], experts_float8.scaled_grouped_mm

    def watched(a, a_scale, b, b_scale, ends, *, fast=True, **options):
        sizes = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))
        assert bool((sizes % 16 == 0).all()) and bool((sizes > 0).all())
        given.append((b.dim() == 2, fast))
        return product(a, a_scale, b, b_scale, ends, fast=fast, **options)

    monkeypatch.setattr(experts_float8, "scaled_grouped_mm", watched)
    run(emulated(in_float8), *example(load))
    assert sorted(given) == [(False, True)] * 4 + [(True, False)] * 2 * in_float8


def test_padding_is_not_seen_by_the_scale_of_a_column(monkeypatch):
    """A token that is much larger than the others, in every second expert alone."""
    x, experts, weights, w13, w2 = example("all")
    experts = torch.stack([torch.arange(100) % 6, (torch.arange(100) + 1) % 6], 1)
    x[-1] *= 2**12
    padded = run(emulated(True), x, experts, weights, w13, w2)[3]
    monkeypatch.setattr(experts_float8, "MULTIPLE", 1)
    for mine, theirs in zip(padded, run(emulated(True), x, experts, weights, w13, w2)[3], strict=True):
        assert relative(mine, theirs) < 3e-3


def test_padded_rows_hold_every_assignment_once():
    experts = torch.tensor([[2, 0], [2, 4], [2, 5], [2, 0], *[[2, 5]] * 20])  # 5: nowhere
    for bound in (None, int((experts < 5).sum())):
        plan = pad_plan(plan_rows(experts, 5, bound), 16)
        assert plan.ends.tolist() == [16, 32, 64, 80, 96] and plan.ends.dtype == torch.int32
        assert len(plan.token) % 16 == 0 and len(plan.token) >= 96 and len(plan.slot) == len(plan.token)
        real = plan.slot < experts.numel()
        assert int(real.sum()) == int((experts < 5).sum()) and bool((plan.token[~real] == len(experts)).all())
        assert torch.equal(plan.token[real], plan.slot[real] // 2)
        here = experts < 5
        assert torch.equal(plan.slot[plan.row[here]], torch.arange(experts.numel()).view_as(experts)[here])
        assert bool((plan.row[~here] >= len(plan.token)).all())
        owner = torch.bucketize(plan.row[here], plan.ends.long(), right=True)
        assert torch.equal(owner, experts[here])


def test_scales_are_the_largest_powers_of_two_that_fit():
    largest = torch.cat([torch.tensor([448.0, 447.0, 449.0, 1.75, 1.7500001, 3e38, 1e-30]), torch.rand(1000).exp()])
    scale, inverse = scales(largest)
    assert bool((torch.frexp(scale)[0] == 0.5).all()) and bool((scale * inverse == 1).all())
    assert bool((largest * scale <= 448).all()) and bool((largest.double() * scale * 2 > 448).all())
    assert all(torch.isfinite(t).all() for t in scales(torch.tensor([0.0, 1e-45, torch.inf, torch.nan])))


def test_a_number_that_is_not_finite_stays_one():
    x = torch.randn(4, 32)
    x[1, 3] = torch.nan
    numbers, inverse = cast_rows(x, None)
    assert torch.isnan(numbers.float()).sum() == 1 and bool(torch.isfinite(inverse).all())


def test_casts_equal_torchao():
    """Of one operand by row, a matrix by column, and a group's rows by column: numbers and scales to the bit."""
    pytest.importorskip("torchao")
    from torchao.prototype.moe_training import utils

    x, w = (torch.randn(96, 64) * torch.randn(96, 1).exp()).bfloat16(), torch.randn(3, 48, 64).bfloat16()
    ends = torch.tensor([16, 48, 96], dtype=torch.int32)
    theirs, scale = utils.torch_to_float8_per_group_colwise(x, ends, FLOAT8, round_scales_to_power_of_2=True)
    numbers, inverse = cast_columns(x, ends, None)
    assert torch.equal(numbers.t().float(), theirs.float()) and torch.equal(1 / inverse.flatten(), scale)
    turned = w.transpose(-2, -1)
    theirs, scale = utils.torch_to_3d_rowwise_float8_transpose_rhs(turned, FLOAT8, round_scales_to_power_of_2=True)
    numbers, inverse = cast_matrices(w)  # (E, K, N) by column is its transpose by row
    assert torch.equal(numbers.float(), theirs.transpose(-2, -1).float())
    assert torch.equal(1 / inverse, scale[:, 0])


def test_rows_without_a_token_are_zeros_to_a_columns_scale():
    x, token = torch.randn(9, 32), torch.tensor([0, 3, *[9] * 14, *[9] * 16])
    numbers, inverse = cast_columns(x, torch.tensor([16, 32], dtype=torch.int32), token)
    assert torch.equal(inverse[0], scales(x[[0, 3]].abs().amax(0))[1])
    assert not numbers[:, 2:].float().any()


def test_experts_are_converted_where_the_configuration_says():
    config = Config()
    config.model.converters, config.quantize.grouped_mm.float8.fqns = [GROUPED], ["layers.1."]
    layers = torch.nn.ModuleDict({f"{i}": torch.nn.Module() for i in range(2)})
    for layer in layers.values():
        layer.experts, layer.router = Experts(4, 32, 16, config.moe), torch.nn.Linear(32, 4)
    model = torch.nn.ModuleDict({"layers": layers})
    names = [name for name, _ in model.named_parameters()]
    use_float8_experts(model, config)
    first, second = (layer.experts.compute for layer in layers.values())
    assert not isinstance(first, functools.partial) and second.func is float8_experts
    assert second.keywords == {"matrices_in_float8": True, "emulate": False}
    assert [name for name, _ in model.named_parameters()] == names


@RECIPES
def test_a_compiler_sees_one_graph(in_float8):
    """Operators and what they say of themselves; inductor is left to a GPU."""
    x, experts, weights, w13, w2 = example("all")
    compiled = torch.compile(emulated(in_float8), backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(
        run(compiled, x, experts, weights, w13, w2), run(emulated(in_float8), x, experts, weights, w13, w2), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_every_kernel_equals_the_readable_cast_when_interpreted():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.model.float8_interpreted"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    errors = dict(line.split("\t") for line in lines)
    assert len(errors) == 34
    for name, error in errors.items():
        assert float(error) <= (1e-5 if "swiglu" in name else 0.0), name
