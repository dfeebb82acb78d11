"""How often each layer runs: checkpointing buys memory with one more forward pass, and with no more than one."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import titan
from config.flavors import ModelShape
from config.schema import Moe
from config.shapes import MoEShape
from model.attention import attention_backend
from model.decoder import Decoder
from model.initial_weights import draw, initial_value
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.data_parallel import apply_fsdp
from parallelisms.names import named_parameters, plain_name
from tests import ranks

MOE = Moe(experts="grouped_mm")
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
        ("nested", "2", [3, 3, 3, 3]),
    ],
)
def test_a_recomputed_block_runs_exactly_once_more_and_a_nested_one_twice(mode, option, runs):
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


def saved_bytes(budget: float) -> tuple[int, dict[str, torch.Tensor]]:
    """What compiled blocks save under a budget, weights included, and gradients."""
    torch.compiler.reset()
    model = Decoder(SHAPE, attention_backend("sdpa"), 16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(draw(name, p.shape, initial_value(name, SHAPE), 0, p.device))
    apply_compile(model, backend="aot_eager", memory_budget=budget)
    tokens, saved = torch.arange(32).view(2, 16) * 3 % 97, {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.update({x.data_ptr(): x.nbytes}) or x, lambda x: x)
    with hooks:
        loss = model(tokens).logsumexp(-1).sum()
    loss.backward()
    return sum(saved.values()), {name: p.grad for name, p in named_parameters(model) if p.grad is not None}


def test_a_compiled_block_keeps_what_its_budget_allows():
    everything, expected = saved_bytes(1.0)
    some, _ = saved_bytes(0.5)
    inputs, gradients = saved_bytes(0.0)
    saved_bytes(1.0)  # the budget is the process's: leave none behind
    assert inputs < some < everything
    hidden = 32 * SHAPE.dim * 4
    weights = 4 * sum(p.numel() for p in Decoder(SHAPE, attention_backend("sdpa"), 16).parameters())
    assert inputs < weights + (LAYERS + 6) * hidden < everything
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name])


def compiled_products(mode: str, option: str = "2") -> tuple[int, int]:
    """Matrix products in the graphs of forward and backward passes of compiled blocks, all of them."""
    torch.compiler.reset()
    found = []

    def counted(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        found.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted, partition_fn=partition)
    model = Decoder(SHAPE, attention_backend("sdpa"), 16)
    if mode != "none":
        apply_activation_checkpoint(model, mode=mode, selective_ac_option=option)
    apply_compile(model, backend=backend)
    model(torch.arange(32).view(2, 16) * 3 % 97).logsumexp(-1).sum().backward()
    torch.compiler.reset()
    forward, backward = found
    return forward, backward


@pytest.mark.parametrize(("mode", "option"), [("full", "2"), ("selective", "1"), ("selective", "op")])
def test_a_compiled_block_too_is_recomputed_once_at_most(mode, option):
    """What no gradient reads, such as the block's last product, is not computed again."""
    assert compiled_products("none") == (PRODUCTS, 2 * PRODUCTS)
    forward, backward = compiled_products(mode, option)
    again = PRODUCTS // 2 if option == "op" else PRODUCTS
    assert forward == PRODUCTS and 0 < backward - 2 * PRODUCTS <= again


def experts_run(mode: str, option: str = "2") -> tuple[Counter[str], list[torch.Size], dict[str, torch.Tensor]]:
    """One pass of a dense block and one with experts: runs of modules, what the latter saves, gradients."""
    shape = replace(SHAPE, n_layers=2, moe=MoEShape(num_experts=4, top_k=2, hidden_dim=24, first_dense_layers=1))
    model = Decoder(shape, attention_backend("sdpa"), 16, moe=MOE)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(draw(name, p.shape, initial_value(name, shape), 0, p.device))
    if mode != "none":
        apply_activation_checkpoint(model, mode=mode, selective_ac_option=option)
    runs: Counter[str] = Counter()
    for name, module in model.named_modules():
        plain = plain_name(name)
        if plain.endswith((".wo", ".w2", ".experts", ".router")):
            module.register_forward_pre_hook(lambda *_, name=plain: runs.update([name]))
    saved: list[torch.Size] = []
    experts = model.get_submodule("layers")["1"].moe.experts
    compute = experts.compute

    def watched(*arguments: torch.Tensor) -> torch.Tensor:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape) or x, lambda x: x)
        with hooks:
            return compute(*arguments)

    if mode == "experts":
        experts.compute = watched
    model(torch.arange(32).view(2, 16) * 3 % 97).logsumexp(-1).sum().backward()
    return runs, saved, {name: p.grad for name, p in named_parameters(model) if p.grad is not None}


@pytest.mark.parametrize(("mode", "products"), [("none", 4), ("experts", 4), ("full", 6), ("selective", 6)])
def test_by_operator_too_products_of_experts_are_computed_again(mode, products):
    """torchtitan's list of operators to keep has no grouped product."""
    with Operators() as operators:
        experts_run(mode, "op" if mode == "selective" else "2")
    assert sum(n for name, n in operators.seen.items() if name.endswith("grouped_mm")) == products
    assert operators.seen["ablation_trainer::expert_weight_gradient"] == 2


def test_checkpointing_around_experts_runs_them_once_and_keeps_inputs_and_pre_activations():
    runs, saved, gradients = experts_run("experts")
    twice = ["layers.0.attention.wo", "layers.0.feed_forward.w2", "layers.1.attention.wo"]
    once = ["layers.1.moe.experts", "layers.1.moe.router"]
    assert runs == dict.fromkeys(twice, 2) | dict.fromkeys(once, 1)
    tokens, rows, dim, hidden = 32, 64, 32, 24
    assert (tokens, dim) in saved and (rows, 2 * hidden) in saved
    assert (rows, dim) not in saved and (rows, hidden) not in saved, "gathered rows, or the result of SwiGLU"
    _, _, expected = experts_run("none")
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=0)


def runs_under_fsdp(mode: str) -> list[int]:
    model = Decoder(SHAPE, attention_backend("sdpa"), 16)
    if mode != "none":
        apply_activation_checkpoint(model, mode=mode, selective_ac_option="2")
    runs: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith(".attention"):
            layer = plain_name(name)
            module.register_forward_pre_hook(lambda *_, layer=layer: runs.update([layer]))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    full = {"param_dtype": torch.float32, "reduce_dtype": torch.float32}
    apply_fsdp(model, mesh, reshard_after_forward="default", **full)
    for _ in range(2):
        model(torch.arange(32).view(2, 16) * 3 % 97).logsumexp(-1).sum().backward()
    return [runs[f"layers.{i}.attention"] // 2 for i in range(LAYERS)]


@pytest.mark.parametrize(("mode", "runs"), [("none", 1), ("full", 2), ("nested", 3)])
def test_fsdp_adds_no_forward_of_its_own(mode, runs):
    assert ranks.run(2, runs_under_fsdp, mode) == [[runs] * LAYERS] * 2
