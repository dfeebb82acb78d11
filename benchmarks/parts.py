"""The hot parts of a training step at the shapes of a workload: what is called, and the bytes and FLOPs that it needs.

Bytes are those of inputs that are read and results that are written once, in the dtype that training has there; of a
forward and backward pass together, what the backward pass needs is read again and nothing else is kept. FLOPs are those
of the matrix products. T tokens, R = T x top-k rows of experts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import attention, loss
from benchmarks.side import ROOT
from benchmarks.timing import Call
from benchmarks.workloads import WORKLOADS
from config.attention import KERNELS as ATTENTION
from config.flavors import resolve_shape
from config.load import load_file
from config.schema import Config
from config.shapes import ModelShape
from model.attention_choice import machine
from model.balance import Balance
from model.compute_dtype import RMSNorm
from model.decoder import Decoder
from model.experts import KERNELS as EXPERTS
from model.feed_forward import gated
from model.grouped_products import grouped_mm
from model.liger import gated as liger_gated
from model.liger import rotate as liger_rotate
from model.liger import use_liger
from model.permute import Plan, plan_rows
from model.rope import rope_frequencies, rope_table, rotate
from model.router import Router
from model.row_ops import choose_row_kernels, combine, gather_rows, swiglu, swiglu_backward
from parallelisms.gradient_norm import clip_grad_norm
from trainer.optimizer import build_optimizer

FORWARD, BOTH = "forward", "forward and backward"
TWO = 2
"""Bytes of a bfloat16 number."""


@dataclass(frozen=True)
class Work:
    """One thing to time."""

    call: Callable[[torch.Generator], Call]
    """Makes a call on random inputs of its own; several of them are taken in turn."""
    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Row:
    """A row of the table; nothing is allocated yet."""

    workload: str
    part: str
    variant: str
    passes: str
    work: Work

    @property
    def name(self) -> str:
        return f"{self.workload}: {self.part}, {self.variant}, {self.passes}"


@dataclass(frozen=True)
class Setting:
    """A workload's shape with the micro-batch of one GPU."""

    name: str
    config: Config
    shape: ModelShape
    rows: int
    device: torch.device
    backend: str
    """Of torch.compile."""

    @property
    def length(self) -> int:
        return self.config.training.seq_len

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def random(self, generator: torch.Generator, *size: int, scale: float = 1.0) -> torch.Tensor:
        """bfloat16, a leaf that takes gradients."""
        x = torch.randn(*size, device=self.device, generator=generator, dtype=torch.bfloat16)
        return (x * scale).requires_grad_()


def setting_of(name: str, device: torch.device, backend: str) -> Setting:
    """Of the workload ``name``, with the micro-batch that its runs try first."""
    workload = WORKLOADS[name]
    config = load_file(ROOT / workload.config).config
    rows = int(workload.settings["ours"].split(",")[0].split("+")[0])
    return Setting(name, config, resolve_shape(config.model, config.moe), rows, device, backend)


def rows_of(setting: Setting) -> list[Row]:
    """Every row of a workload, in the order in which a step runs through them."""
    groups = [_norm(setting), _rope(setting), _attention(setting)]
    if setting.shape.moe is None:
        groups.append(_dense_swiglu(setting))
    else:
        groups += [_router(setting), _dispatch(setting), _products(setting), _experts(setting)]
    return list(itertools.chain(*groups, _head(setting), _update(setting)))


PARTS = (
    "RMSNorm",
    "RoPE",
    "attention",
    "SwiGLU",
    "router",
    "plan",
    "gather",
    "combine",
    "expert SwiGLU",
    "expert product",
    "experts",
    "head and loss",
    "norm and clip",
    "AdamW",
)
"""What ``Row.part`` may be."""


def _differentiated(function: Callable[..., Any], leaves: list[torch.Tensor]) -> tuple[Call, Call]:
    """Calls of the forward pass alone, and of both: gradients of ``leaves`` for a fixed gradient of each result."""

    def results() -> tuple[torch.Tensor, ...]:
        out = function(*leaves)
        return out if isinstance(out, tuple) else (out,)

    def forward() -> Any:
        with torch.no_grad():
            return function(*leaves)

    with torch.no_grad():
        grads = [torch.randn_like(out) for out in results()]
    return forward, lambda: torch.autograd.grad(results(), leaves, grads)


def _pair(
    setting: Setting,
    part: str,
    variant: str,
    make: Callable[[torch.Generator], tuple[Call, Call]],
    bytes: tuple[int, int],
    flops: tuple[int, int] = (0, 0),
) -> Iterator[Row]:
    """The two rows of what has a backward pass: bytes and FLOPs of the forward pass, and of both."""
    for number, passes in enumerate((FORWARD, BOTH)):
        call = functools.partial(lambda generator, number: make(generator)[number], number=number)
        yield Row(setting.name, part, variant, passes, Work(call, bytes[number], flops[number]))


def _compiled(setting: Setting, function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=setting.backend, dynamic=False)


def _norm(setting: Setting) -> Iterator[Row]:
    size = (setting.rows, setting.length, setting.shape.dim)

    def make(generator: torch.Generator, variant: str) -> tuple[Call, Call]:
        holder = nn.Sequential(RMSNorm(setting.shape.dim, eps=setting.shape.norm_eps))
        if variant == "liger":
            use_liger(holder, rms_norm=True)
        norm = holder.to(setting.device, torch.bfloat16)[0]
        function = _compiled(setting, norm) if variant == "compiled" else norm
        leaves = [setting.random(generator, *size)]
        forward, _ = _differentiated(function, leaves)
        grad = torch.randn_like(leaves[0])
        return forward, lambda: torch.autograd.grad(function(*leaves), [*leaves, norm.weight], grad)

    moved = setting.tokens * setting.shape.dim * TWO
    for variant in ("eager", "compiled", "liger"):
        yield from _pair(setting, "RMSNorm", variant, functools.partial(make, variant=variant), (2 * moved, 5 * moved))


def _rope(setting: Setting) -> Iterator[Row]:
    shape = setting.shape
    heads = (shape.n_heads, shape.n_kv_heads)

    def make(generator: torch.Generator, variant: str) -> tuple[Call, Call]:
        frequencies = rope_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        table = rope_table(setting.length, frequencies).to(setting.device)
        function = {"eager": rotate, "compiled": _compiled(setting, rotate), "liger": liger_rotate}[variant]
        leaves = [setting.random(generator, setting.rows, setting.length, h, shape.head_dim) for h in heads]
        return _differentiated(lambda q, k: function(q, k, table), leaves)

    moved = setting.tokens * sum(heads) * shape.head_dim * TWO
    for variant in ("eager", "compiled", "liger"):
        yield from _pair(setting, "RoPE", variant, functools.partial(make, variant=variant), (2 * moved, 4 * moved))


def _attention(setting: Setting) -> Iterator[Row]:
    """Causal, over whole sequences; benchmarks/attention.py has packed documents too."""
    shape = setting.shape
    heads = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads, shape.n_heads)

    def make(generator: torch.Generator, name: str) -> tuple[Call, Call]:
        tensors = [setting.random(generator, setting.rows, setting.length, h, shape.head_dim) for h in heads]
        calls = attention.calls_of(name, tensors[:3], tensors[3].detach(), None, None)
        return calls["forward"], calls["forward and backward"]

    moved = setting.tokens * shape.head_dim * TWO
    q, kv = shape.n_heads * moved, 2 * shape.n_kv_heads * moved
    flops = 4 * shape.n_heads * shape.head_dim * attention.pairs(None, setting.rows, setting.length)
    missing = machine(setting.device.type).missing
    for name, kernel in ATTENTION.items():
        runs = name not in missing and (kernel.cpu or setting.device.type == "cuda")
        if runs and name != "sdpa_math":  # it writes all S^2 scores
            yield from _pair(
                setting,
                "attention",
                name,
                functools.partial(make, name=name),
                (2 * q + kv, 5 * q + 3 * kv),
                (flops, flops * 7 // 2),
            )


def _dense_swiglu(setting: Setting) -> Iterator[Row]:
    size = (setting.rows, setting.length, setting.shape.hidden_dim)

    def make(generator: torch.Generator, variant: str) -> tuple[Call, Call]:
        function = {"eager": gated, "compiled": _compiled(setting, gated), "liger": liger_gated}[variant]
        return _differentiated(function, [setting.random(generator, *size) for _ in range(2)])

    moved = setting.tokens * setting.shape.hidden_dim * TWO
    for variant in ("eager", "compiled", "liger"):
        yield from _pair(setting, "SwiGLU", variant, functools.partial(make, variant=variant), (3 * moved, 8 * moved))


def _router(setting: Setting) -> Iterator[Row]:
    """The linear map, the choice and what the balancing rule counts, of one layer."""
    shape, moe = setting.shape, setting.config.moe
    assert shape.moe is not None
    experts = shape.moe

    def make(generator: torch.Generator, variant: str) -> tuple[Call, Call]:
        router = Router(shape.dim, experts, moe).to(setting.device, torch.bfloat16)
        balance = Balance(experts, moe, 0, 0).to(setting.device)
        with torch.no_grad():
            router.gate.weight.normal_(std=shape.dim**-0.5)
        number = torch.arange(setting.tokens, device=setting.device)
        valid = torch.ones(setting.rows, setting.length, dtype=torch.bool, device=setting.device)

        def route(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            routing = router(
                x,
                number,
                valid.flatten(),
                balance.noise_key,
                balance.coefficients[2],
                balance.bias,
                balance.choose_by,
            )
            added, observation = balance.observe(routing, valid, None)
            weights = routing.weights
            return weights.sum() + (0.0 if added is None else added), observation.counts

        function = _compiled(setting, route) if variant == "compiled" else route
        x = setting.random(generator, setting.tokens, shape.dim)

        def forward() -> Any:
            with torch.no_grad():
                return function(x)

        return forward, lambda: torch.autograd.grad(function(x)[0], [x, router.gate.weight])

    moved = setting.tokens * shape.dim * TWO
    flops = 2 * setting.tokens * shape.dim * experts.num_experts
    for variant in ("eager", "compiled"):
        yield from _pair(
            setting,
            "router",
            variant,
            functools.partial(make, variant=variant),
            (moved, 3 * moved),
            (flops, 3 * flops),
        )


def _choices(setting: Setting, generator: torch.Generator) -> torch.Tensor:
    """int64 (T, top-k): different random experts a token."""
    moe = setting.shape.moe
    assert moe is not None
    scores = torch.rand(setting.tokens, moe.num_experts, device=setting.device, generator=generator)
    return scores.topk(moe.top_k).indices


def _dispatch(setting: Setting) -> Iterator[Row]:
    """Rows to experts and back, where all experts are here."""
    shape = setting.shape
    assert shape.moe is not None
    moe = shape.moe
    tokens, rows, device = setting.tokens, setting.tokens * moe.top_k, setting.device

    def plan_of(generator: torch.Generator) -> Plan:
        return plan_rows(_choices(setting, generator), moe.num_experts)

    def plan(generator: torch.Generator) -> Call:
        return functools.partial(plan_rows, _choices(setting, generator), moe.num_experts)

    # Read the ids, write token, slot and row of each: int64.
    yield Row(setting.name, "plan", "eager", FORWARD, Work(plan, 4 * 8 * rows))

    def gather(generator: torch.Generator, kernels: str) -> tuple[Call, Call]:
        choose_row_kernels(kernels, device.type)
        to = plan_of(generator)
        x = setting.random(generator, tokens, shape.dim)
        return _differentiated(lambda x: gather_rows(x, to.token, to.row), [x])

    def weighted(generator: torch.Generator, kernels: str) -> tuple[Call, Call]:
        choose_row_kernels(kernels, device.type)
        to = plan_of(generator)
        weights = torch.rand(tokens, moe.top_k, device=device, generator=generator).requires_grad_()
        y = setting.random(generator, rows, shape.dim)
        return _differentiated(lambda y, weights: combine(y, weights, to.token, to.slot, to.row), [y, weights])

    def active(generator: torch.Generator, kernels: str) -> tuple[Call, Call]:
        choose_row_kernels(kernels, device.type)
        to = plan_of(generator)
        weights = torch.rand(tokens, moe.top_k, device=device, generator=generator)
        h = setting.random(generator, rows, 2 * moe.hidden_dim).detach()
        grad = setting.random(generator, rows, moe.hidden_dim).detach()
        backward = functools.partial(swiglu_backward, h, grad, weights, to.slot, to.ends)
        return functools.partial(swiglu, h), lambda: (swiglu(h), backward())

    wide, narrow = rows * shape.dim * TWO, tokens * shape.dim * TWO
    hidden = rows * moe.hidden_dim * TWO
    for kernels in ("triton", "torch"):
        choose = functools.partial(_pair, setting, variant=kernels)
        # The backward pass of a gather is a sum over rows, that of a sum with weights reads the rows and the gradient.
        yield from choose(
            part="gather", make=functools.partial(gather, kernels=kernels), bytes=(narrow + wide, 2 * (narrow + wide))
        )
        yield from choose(
            part="combine",
            make=functools.partial(weighted, kernels=kernels),
            bytes=(narrow + wide, 2 * narrow + 3 * wide),
        )
        # h is two hidden; the backward pass reads h and grad, and writes the gradient of h and the activation anew.
        yield from choose(
            part="expert SwiGLU", make=functools.partial(active, kernels=kernels), bytes=(3 * hidden, 9 * hidden)
        )


def _products(setting: Setting) -> Iterator[Row]:
    """Each grouped product of the experts alone."""
    shape = setting.shape
    assert shape.moe is not None
    moe = shape.moe
    rows, dim, hidden, experts = setting.tokens * moe.top_k, shape.dim, moe.hidden_dim, moe.num_experts

    def make(generator: torch.Generator, name: str) -> Call:
        ends = plan_rows(_choices(setting, generator), experts).ends
        x = setting.random(generator, rows, dim).detach()
        if name == "x w13":
            return functools.partial(grouped_mm, x, setting.random(generator, experts, dim, 2 * hidden).detach(), ends)
        if name == "a w2^T":
            a = setting.random(generator, rows, hidden).detach()
            w2 = setting.random(generator, experts, dim, hidden).detach()
            return functools.partial(grouped_mm, a, w2.transpose(-2, -1), ends)
        if name == "dh w13^T":
            dh = setting.random(generator, rows, 2 * hidden).detach()
            w13 = setting.random(generator, experts, dim, 2 * hidden).detach()
            return functools.partial(grouped_mm, dh, w13.transpose(-2, -1), ends)
        if name == "g w2":
            return functools.partial(grouped_mm, x, setting.random(generator, experts, dim, hidden).detach(), ends)
        width = 2 * hidden if name == "x^T dh" else hidden
        return functools.partial(grouped_mm, x.t(), setting.random(generator, rows, width).detach(), ends)

    for name, width in {
        "x w13": 2 * hidden,
        "a w2^T": hidden,
        "dh w13^T": 2 * hidden,
        "g w2": hidden,
        "x^T dh": 2 * hidden,
        "g^T a": hidden,
    }.items():
        passes = FORWARD if name in ("x w13", "a w2^T") else "backward"
        moved = TWO * (rows * (dim + width) + experts * dim * width)
        work = Work(functools.partial(make, name=name), moved, 2 * rows * dim * width)
        yield Row(setting.name, "expert product", name, passes, work)


def _experts(setting: Setting) -> Iterator[Row]:
    """The whole expert network of a layer, from tokens to tokens, planning included."""
    shape = setting.shape
    assert shape.moe is not None
    moe = shape.moe
    dim, hidden, experts = shape.dim, moe.hidden_dim, moe.num_experts
    rows = setting.tokens * moe.top_k

    def make(generator: torch.Generator, kernel: str, compiled: bool) -> tuple[Call, Call]:
        choose_row_kernels("auto", setting.device.type)
        ids = _choices(setting, generator)
        weights = torch.rand(ids.shape, device=setting.device, generator=generator).requires_grad_()
        x = setting.random(generator, setting.tokens, dim)
        w13 = setting.random(generator, experts, dim, 2 * hidden, scale=dim**-0.5)
        w2 = setting.random(generator, experts, dim, hidden, scale=hidden**-0.5)

        def function(x: torch.Tensor, weights: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
            return EXPERTS[kernel](x, ids, weights, w13, w2, rows)

        return _differentiated(_compiled(setting, function) if compiled else function, [x, weights, w13, w2])

    tokens, matrices = setting.tokens * dim * TWO, 3 * experts * dim * hidden * TWO
    kept = rows * 2 * hidden * TWO  # h
    flops = 6 * rows * dim * hidden
    for kernel in EXPERTS:
        if kernel == "loop":  # waits for the device at every expert
            continue
        for compiled in (False, True):
            yield from _pair(
                setting,
                "experts",
                f"{kernel}, compiled" if compiled else kernel,
                functools.partial(make, kernel=kernel, compiled=compiled),
                (2 * tokens + matrices, 5 * tokens + 3 * matrices + 2 * kept),
                (flops, 3 * flops),
            )


def _head(setting: Setting) -> Iterator[Row]:
    """Head and each loss; benchmarks/loss.py has their memory too."""
    shape, section = setting.shape, Config().loss
    options = argparse.Namespace(
        tokens=setting.tokens,
        dim=shape.dim,
        rows_per_chunk=section.rows_per_chunk,
        columns_per_chunk=section.columns_per_chunk,
    )

    def make(generator: torch.Generator, name: str, compiled: bool) -> Call:
        hidden = setting.random(generator, 1, setting.tokens, shape.dim)
        weight = setting.random(generator, shape.vocab_size, shape.dim, scale=shape.dim**-0.5)
        labels = torch.randint(shape.vocab_size, (1, setting.tokens), device=setting.device, generator=generator)
        return loss.call_of(name, compiled, options, [hidden, weight, labels], backend=setting.backend)

    product = 2 * setting.tokens * shape.dim * shape.vocab_size
    moved = 2 * TWO * shape.dim * (setting.tokens + shape.vocab_size)
    for name, compiled in loss.rows_of(loss.NAMES):
        work = Work(functools.partial(make, name=name, compiled=compiled), moved, 3 * product)
        yield Row(
            setting.name,
            "head and loss",
            f"{name}, compiled" if compiled else name,
            BOTH,
            work,
        )


def _update(setting: Setting) -> Iterator[Row]:
    """Norm, clipping and AdamW of the float32 shards that one of two GPUs holds."""
    with torch.device("meta"):
        model = Decoder(setting.shape, attention.attention_backend("sdpa"), setting.length, setting.config.moe)
    sizes = {name: (-(-len(p) // 2), *p.shape[1:]) for name, p in model.named_parameters()}
    numbers = sum(torch.Size(size).numel() for size in sizes.values())

    def parameters(generator: torch.Generator) -> dict[str, nn.Parameter]:
        found = {}
        for name, size in sizes.items():
            found[name] = nn.Parameter(torch.randn(size, device=setting.device, generator=generator))
            found[name].grad = torch.randn(size, device=setting.device, generator=generator)
        return found

    def clip(generator: torch.Generator) -> Call:
        held = nn.ParameterList(parameters(generator).values())
        return functools.partial(clip_grad_norm, held, 1.0)

    def adamw(generator: torch.Generator, variant: str) -> Call:
        section = setting.config.optimizer
        backend = setting.backend if variant == "compiled" else None
        chosen = type(section)(**{**vars(section), "implementation": "fused" if backend else variant})
        return build_optimizer(parameters(generator).items(), chosen, backend=backend).step

    # The norm reads gradients, clipping reads and writes them; AdamW reads four numbers and writes three.
    yield Row(setting.name, "norm and clip", "foreach", "step", Work(clip, 12 * numbers))
    for variant in ("fused", "foreach", "compiled"):
        work = Work(functools.partial(adamw, variant=variant), 28 * numbers)
        yield Row(setting.name, "AdamW", variant, "step", work)
