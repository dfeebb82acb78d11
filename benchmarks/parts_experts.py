"""Hot parts of a mixture of experts: benchmarks/parts.py."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.part import FORWARD, TWO, Row, Setting, Work, compiled_call, differentiated, pair
from benchmarks.timing import Call
from model.balance import Balance
from model.experts import KERNELS as EXPERTS
from model.grouped_products import grouped_mm
from model.permute import Plan, plan_rows
from model.router import Router
from model.row_ops import choose_row_kernels, combine, gather_rows, swiglu, swiglu_backward


def router_rows(setting: Setting) -> Iterator[Row]:
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

        function = compiled_call(setting, route) if variant == "compiled" else route
        x = setting.random(generator, setting.tokens, shape.dim)

        def forward() -> Any:
            with torch.no_grad():
                return function(x)

        return forward, lambda: torch.autograd.grad(function(x)[0], [x, router.gate.weight])

    moved = setting.tokens * shape.dim * TWO
    flops = 2 * setting.tokens * shape.dim * experts.num_experts
    for variant in ("eager", "compiled"):
        yield from pair(
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


def dispatch_rows(setting: Setting) -> Iterator[Row]:
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
        return differentiated(lambda x: gather_rows(x, to.token, to.row), [x])

    def weighted(generator: torch.Generator, kernels: str) -> Call:
        choose_row_kernels(kernels, device.type)
        to = plan_of(generator)
        weights = torch.rand(tokens, moe.top_k, device=device, generator=generator)
        return functools.partial(combine, setting.random(generator, rows, shape.dim).detach(), weights, to.row)

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
        choose = functools.partial(pair, setting, variant=kernels)
        # The backward pass of a gather is a sum over rows.
        yield from choose(
            part="gather", make=functools.partial(gather, kernels=kernels), bytes=(narrow + wide, 2 * (narrow + wide))
        )
        work = Work(functools.partial(weighted, kernels=kernels), narrow + wide)
        yield Row(setting.name, "combine", kernels, FORWARD, work)
        # h is two hidden; the backward pass reads h and grad, and writes the gradient of h and the activation anew.
        yield from choose(
            part="expert SwiGLU", make=functools.partial(active, kernels=kernels), bytes=(3 * hidden, 9 * hidden)
        )


def products_rows(setting: Setting) -> Iterator[Row]:
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


def experts_rows(setting: Setting) -> Iterator[Row]:
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

        return differentiated(compiled_call(setting, function) if compiled else function, [x, weights, w13, w2])

    tokens, matrices = setting.tokens * dim * TWO, 3 * experts * dim * hidden * TWO
    kept = rows * 2 * hidden * TWO  # h
    flops = 6 * rows * dim * hidden
    for kernel in EXPERTS:
        if kernel == "loop":  # waits for the device at every expert
            continue
        for compiled in (False, True):
            yield from pair(
                setting,
                "experts",
                f"{kernel}, compiled" if compiled else kernel,
                functools.partial(make, kernel=kernel, compiled=compiled),
                (2 * tokens + matrices, 5 * tokens + 3 * matrices + 2 * kept),
                (flops, 3 * flops),
            )
