import pytest
import torch

from config.errors import ConfigError
from config.schema import Moe
from model.experts import KERNELS, Experts, loop_experts
from model.experts_grouped import grouped_experts
from model.experts_quack import quack_experts

EXPERTS, DIM, HIDDEN = 6, 16, 24


def weights_of(dtype: torch.dtype, device: str = "cpu", experts: int = EXPERTS, dim: int = DIM, hidden: int = HIDDEN):
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(experts, dim, 2 * hidden, generator=generator, dtype=torch.float64) * dim**-0.5
    w2 = torch.randn(experts, dim, hidden, generator=generator, dtype=torch.float64) * hidden**-0.5
    return [w.to(device, dtype).requires_grad_() for w in (w13, w2)]


def routed(tokens: int, slots: int, experts: int = EXPERTS, allowed: list[int] | None = None):
    generator = torch.Generator().manual_seed(2)
    score = torch.rand(tokens, experts, generator=generator)
    if allowed is not None:
        score[:, [e for e in range(experts) if e not in allowed]] -= 1.0
    weights = torch.rand(tokens, slots, generator=generator, dtype=torch.float64)
    return score.topk(slots).indices, weights


def run(kernel, x, experts, weights, w13, w2, max_rows=None):
    leaves = [t.detach().requires_grad_() for t in (x, weights, w13, w2)]
    out = kernel(leaves[0], experts, leaves[1], leaves[2], leaves[3], max_rows)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    out.backward(seed.to(out.device, out.dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


@pytest.mark.parametrize("slots", [1, 3])
def test_grouped_equals_loop_in_float64(slots):
    x = torch.randn(37, DIM, dtype=torch.float64)
    experts, weights = routed(37, slots)
    w13, w2 = weights_of(torch.float64)
    for mine, theirs in zip(
        run(grouped_experts, x, experts, weights, w13, w2), run(loop_experts, x, experts, weights, w13, w2), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_grouped_is_as_close_to_float64_as_its_dtype_allows(dtype, tolerance):
    x = torch.randn(64, DIM, dtype=torch.float64)
    experts, weights = routed(64, 2)
    exact = run(loop_experts, x, experts, weights, *weights_of(torch.float64))
    found = run(grouped_experts, x.to(dtype), experts, weights.float(), *weights_of(dtype))
    for name, mine, theirs in zip(("out", "x", "weights", "w13", "w2"), found, exact, strict=True):
        assert relative(mine, theirs) < tolerance, name


def test_the_formula_by_hand():
    w13, w2 = weights_of(torch.float64)
    x = torch.randn(1, DIM, dtype=torch.float64)
    gate, up = x @ w13[4][:, 0::2], x @ w13[4][:, 1::2]
    expected = 0.7 * (torch.nn.functional.silu(gate) * up) @ w2[4].T
    for kernel in (loop_experts, grouped_experts):
        found = kernel(x, torch.tensor([[4]]), torch.tensor([[0.7]], dtype=torch.float64), w13, w2)
        torch.testing.assert_close(found, expected)


@pytest.fixture
def poisoned_memory():
    """Every torch.empty starts as NaN, so that a result nobody wrote is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("allowed", [[0, 1], [4, 5], [2, 3]])
def test_experts_without_tokens_get_exactly_zero_gradients(poisoned_memory, dtype, allowed):
    x = torch.randn(32, DIM).to(dtype)
    experts, weights = routed(32, 2, allowed=allowed)
    w13, w2 = weights_of(dtype)
    found = run(grouped_experts, x, experts, weights.float(), w13, w2)
    reference = run(loop_experts, x, experts, weights.float(), w13, w2)
    assert all(torch.isfinite(t).all() for t in found)
    for gradient in found[3:]:
        for expert in range(EXPERTS):
            assert bool((gradient[expert] == 0).all()) == (expert not in allowed)
    for mine, theirs in zip(found, reference, strict=True):
        assert relative(mine, theirs) < (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("kernel", ["loop", "grouped_mm"])
def test_all_tokens_to_one_expert_and_no_tokens_at_all(poisoned_memory, kernel):
    w13, w2 = weights_of(torch.float32)
    one = torch.zeros(9, 1, dtype=torch.int64)
    found = run(KERNELS[kernel], torch.randn(9, DIM), one, torch.ones(9, 1), w13, w2)
    assert all(torch.isfinite(t).all() for t in found) and not found[3][1:].any() and found[3][0].any()
    nobody = torch.full((9, 1), EXPERTS)
    found = run(
        KERNELS[kernel], torch.randn(9, DIM), nobody, torch.zeros(9, 1), w13, w2, 0 if kernel != "loop" else None
    )
    assert not any(t.any() for t in found), "a layer that got no assignment is zero, and so are all its gradients"


def test_nowhere_slots_add_nothing(poisoned_memory):
    x, (experts, weights) = torch.randn(20, DIM), routed(20, 3)
    w13, w2 = weights_of(torch.float32)
    dropped = torch.rand(20, 3, generator=torch.Generator().manual_seed(5)) < 0.4
    ids, kept = experts.masked_fill(dropped, EXPERTS), weights.float() * ~dropped
    bound = int((~dropped).sum())
    reference = run(loop_experts, x, ids, kept, w13, w2)
    for max_rows in (None, bound):
        for mine, theirs in zip(run(grouped_experts, x, ids, kept, w13, w2, max_rows), reference, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_only_input_and_pre_activation_are_saved_for_backward():
    x = torch.randn(40, DIM, requires_grad=True)
    experts, weights = routed(40, 2)
    w13, w2 = weights_of(torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        grouped_experts(x, experts, weights.float(), w13, w2)
    floats = sorted(
        tuple(t.shape) for t in saved if t.is_floating_point() and t.data_ptr() not in (w13.data_ptr(), w2.data_ptr())
    )
    assert floats == sorted([(40, DIM), (40, 2), (80, 2 * HIDDEN)])


def test_a_module_under_autocast_computes_in_its_dtype():
    module = Experts(EXPERTS, DIM, HIDDEN, Moe())
    with torch.no_grad():
        for p, w in zip(module.parameters(), weights_of(torch.float32), strict=True):
            p.copy_(w)
    x, (experts, weights) = torch.randn(8, DIM), routed(8, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, experts, weights.float())
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and module.w13.grad.dtype == torch.float32


def test_quack_says_where_it_runs():
    w13, w2 = weights_of(torch.float32)
    with pytest.raises(ConfigError, match="CUDA.*grouped_mm"):
        quack_experts(torch.randn(4, DIM), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1), w13, w2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernel", ["grouped_mm", "quack"])
@pytest.mark.parametrize("allowed", [None, [0, 3]])
def test_gpu_kernels_agree_with_float64(kernel, allowed):
    if kernel == "quack":
        pytest.importorskip("quack")
    experts_n, dim, hidden, tokens = 8, 256, 128, 1000
    x = torch.randn(tokens, dim, dtype=torch.float64)
    experts, weights = routed(tokens, 2, experts_n, allowed)
    exact = run(loop_experts, x, experts, weights, *weights_of(torch.float64, "cpu", experts_n, dim, hidden))
    found = run(
        KERNELS[kernel],
        x.cuda().bfloat16(),
        experts.cuda(),
        weights.cuda().float(),
        *weights_of(torch.bfloat16, "cuda", experts_n, dim, hidden),
    )
    for name, mine, theirs in zip(("out", "x", "weights", "w13", "w2"), found, exact, strict=True):
        assert torch.isfinite(mine).all(), name
        assert relative(mine, theirs) < 1e-2, name
    if allowed is not None:
        assert not found[3][1].any() and not found[4][1].any()
