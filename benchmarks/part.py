"""What a row of the hot parts is, at the shape of a workload, and how one with a backward pass is called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.side import ROOT
from benchmarks.timing import Call
from benchmarks.workloads import WORKLOADS
from config.flavors import resolve_shape
from config.load import load_file
from config.schema import Config
from config.shapes import ModelShape

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


def differentiated(function: Callable[..., Any], leaves: list[torch.Tensor]) -> tuple[Call, Call]:
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


def pair(
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


def compiled_call(setting: Setting, function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=setting.backend, dynamic=False)
