"""Hot parts that every block has, and those outside blocks: benchmarks/parts.py."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks import attention, loss
from benchmarks.part import BOTH, TWO, Row, Setting, Work, compiled_call, differentiated, pair
from benchmarks.timing import Call
from config.attention import KERNELS as ATTENTION
from config.schema import Config
from model.attention_choice import machine
from model.compute_dtype import RMSNorm
from model.decoder import Decoder
from model.feed_forward import gated
from model.liger import gated as liger_gated
from model.liger import rotate as liger_rotate
from model.liger import use_liger
from model.rope import rope_frequencies, rope_table, rotate
from parallelisms.gradient_norm import clip_grad_norm
from trainer.optimizer import build_optimizer


def norm_rows(setting: Setting) -> Iterator[Row]:
    size = (setting.rows, setting.length, setting.shape.dim)

    def make(generator: torch.Generator, variant: str) -> tuple[Call, Call]:
        holder = nn.Sequential(RMSNorm(setting.shape.dim, eps=setting.shape.norm_eps))
        if variant == "liger":
            use_liger(holder, rms_norm=True)
        norm = holder.to(setting.device, torch.bfloat16)[0]
        function = compiled_call(setting, norm) if variant == "compiled" else norm
        leaves = [setting.random(generator, *size)]
        forward, _ = differentiated(function, leaves)
        grad = torch.randn_like(leaves[0])
        return forward, lambda: torch.autograd.grad(function(*leaves), [*leaves, norm.weight], grad)

    moved = setting.tokens * setting.shape.dim * TWO
    for variant in ("eager", "compiled", "liger"):
        yield from pair(setting, "RMSNorm", variant, functools.partial(make, variant=variant), (2 * moved, 5 * moved))


def rope_rows(setting: Setting) -> Iterator[Row]:
    shape = setting.shape
    heads = (shape.n_heads, shape.n_kv_heads)

    def make(generator: torch.Generator, variant: str) -> tuple[Call, Call]:
        frequencies = rope_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)
        table = rope_table(setting.length, frequencies).to(setting.device)
        function = {"eager": rotate, "compiled": compiled_call(setting, rotate), "liger": liger_rotate}[variant]
        leaves = [setting.random(generator, setting.rows, setting.length, h, shape.head_dim) for h in heads]
        return differentiated(lambda q, k: function(q, k, table), leaves)

    moved = setting.tokens * sum(heads) * shape.head_dim * TWO
    for variant in ("eager", "compiled", "liger"):
        yield from pair(setting, "RoPE", variant, functools.partial(make, variant=variant), (2 * moved, 4 * moved))


def attention_rows(setting: Setting) -> Iterator[Row]:
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
            yield from pair(
                setting,
                "attention",
                name,
                functools.partial(make, name=name),
                (2 * q + kv, 5 * q + 3 * kv),
                (flops, flops * 7 // 2),
            )


def dense_swiglu_rows(setting: Setting) -> Iterator[Row]:
    size = (setting.rows, setting.length, setting.shape.hidden_dim)

    def make(generator: torch.Generator, variant: str) -> tuple[Call, Call]:
        function = {"eager": gated, "compiled": compiled_call(setting, gated), "liger": liger_gated}[variant]
        return differentiated(function, [setting.random(generator, *size) for _ in range(2)])

    moved = setting.tokens * setting.shape.hidden_dim * TWO
    for variant in ("eager", "compiled", "liger"):
        yield from pair(setting, "SwiGLU", variant, functools.partial(make, variant=variant), (3 * moved, 8 * moved))


def head_rows(setting: Setting) -> Iterator[Row]:
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


def update_rows(setting: Setting) -> Iterator[Row]:
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
