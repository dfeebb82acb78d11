"""Attention kernels as data: what each can do, which configurations it is refused for, and what "auto" takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from config.errors import ConfigError
from config.schema import Config
from config.shapes import ModelShape

Said = Callable[[str], str]


@dataclass(frozen=True)
class AttentionKernel:
    """What a backend of ``attention.backend`` can do."""

    title: str
    cpu: bool = False
    """Whether it trains on a CPU."""
    document_mask: bool = True
    float32: bool = False
    """Whether it computes in float32 too, not in bfloat16 alone."""
    head_dim: tuple[int, int, int] = (1, 2**16, 1)
    """Smallest and largest head_dim, and what divides it."""
    capability: tuple[int, int] = (0, 99)
    """First and last major compute capability of the GPUs it runs on, 9 being Hopper."""
    deterministic: bool = True
    """Whether it has a backward pass that gives the same bits every time."""
    blocks: str = "plain"
    """Use on blocks of keys, as ring and all-gather attention do: "masked" with documents too, "" not at all."""
    package: str = ""
    """Distribution that holds it, where torch does not."""


KERNELS: dict[str, AttentionKernel] = {
    "sdpa": AttentionKernel(
        "torch's choice: cuDNN, flash, memory-efficient, else math", cpu=True, float32=True, blocks="masked"
    ),
    "sdpa_math": AttentionKernel(
        "plain operators, the score matrix in memory", cpu=True, float32=True, blocks="masked"
    ),
    "sdpa_flash": AttentionKernel(
        "FlashAttention-2 as built into torch", document_mask=False, head_dim=(8, 256, 8), capability=(8, 99)
    ),
    "sdpa_cudnn": AttentionKernel(
        "cuDNN", document_mask=False, head_dim=(8, 128, 8), capability=(8, 99), deterministic=False
    ),
    "flex": AttentionKernel(
        "FlexAttention, compiled with a block mask", float32=True, head_dim=(16, 256, 1), capability=(8, 99), blocks=""
    ),
    "flash2": AttentionKernel(
        "flash-attn 2, a source build", head_dim=(8, 256, 8), capability=(8, 99), package="flash-attn"
    ),
    "flash4": AttentionKernel(
        "FlashAttention-4 in CuTe DSL", head_dim=(8, 256, 8), capability=(9, 11), package="flash-attn-4"
    ),
}
"""Value of attention.backend -> what it is. docs/attention.md shows this table."""

BLACKWELL, BLACKWELL_HEAD_DIM = 10, 128  # flash-attn-4 has no wider kernel there, but for 256 alone

AUTO = {False: ("flash4", "sdpa_cudnn", "sdpa_flash", "sdpa"), True: ("flash4", "flex", "sdpa")}
"""With document masks or without -> what "auto" tries on a GPU, in this order."""


@dataclass(frozen=True)
class Machine:
    """What a choice of kernel depends on besides the configuration."""

    device: str
    """"cpu" or "cuda"."""
    capability: int = 0
    """Major compute capability of the GPU."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Backend -> why its package cannot be imported, for those that cannot."""


@dataclass(frozen=True)
class Choice:
    """The kernel of a run."""

    name: str
    passed_over: tuple[str, ...] = ()
    """Under "auto": the kernels that come before it in the order, each with the reason, a phrase."""

    def notes(self) -> list[str]:
        """What the run's record says about the choice: nothing if no kernel was passed over."""
        if not self.passed_over:
            return []
        return [f'attention.backend = "auto" is {self.name} here: {"; ".join(self.passed_over)}.']


def attention_rules(config: Config, shape: ModelShape, said: Said) -> Iterator[str]:
    """What the backend asked for cannot do on any machine, a sentence or two each. "auto" avoids all of it."""
    name = config.attention.backend
    if name == "auto":
        return
    others = [n for n in KERNELS if not any(_unfit(n, config, shape))]
    for key, problem in _unfit(name, config, shape):
        what = f"{said('attention.backend')} {problem}, and {said(key)}."
        yield f"{what} Backends that fit this configuration: {', '.join(others)}."


def _unfit(name: str, config: Config, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """(key, what the backend cannot do) for each key that it does not fit."""
    kernel = KERNELS[name]
    low, high, unit = kernel.head_dim
    if config.data.document_mask and not kernel.document_mask:
        yield "data.document_mask", "knows no document masks"
    section = config.parallelism
    if section.context_parallel_degree > 1 and section.context_parallel_method != "ulysses":
        if not kernel.blocks:
            yield "parallelism.context_parallel_method", "cannot attend block by block"
        elif config.data.document_mask and kernel.document_mask and kernel.blocks != "masked":
            yield "data.document_mask", f"takes no masks block by block, as {section.context_parallel_method} attends"
    if config.training.mixed_precision_param != "bfloat16" and not kernel.float32:
        yield "training.mixed_precision_param", "computes in bfloat16"
    if not low <= shape.head_dim <= high or shape.head_dim % unit:
        multiples = f", in multiples of {unit}" if unit > 1 else ""
        yield "model.head_dim", f"takes heads of {low} to {high} features{multiples}"
    if config.debug.deterministic and not config.debug.deterministic_warn_only and not kernel.deterministic:
        yield "debug.deterministic", "has no deterministic backward pass"


def _unfit_on(name: str, shape: ModelShape, machine: Machine) -> str:
    """Why a kernel cannot run on a machine, a phrase; empty if it can."""
    kernel = KERNELS[name]
    if machine.device == "cpu":
        return "" if kernel.cpu else "needs a GPU to train"
    first, last = kernel.capability
    if not first <= machine.capability <= last:
        span = f"{first}" if last == 99 else f"{first} to {last}"
        return f"needs compute capability {span}{' or newer' if last == 99 else ''}, this GPU has {machine.capability}"
    if name == "flash4" and machine.capability >= BLACKWELL and shape.head_dim > BLACKWELL_HEAD_DIM:
        return f"takes heads of at most {BLACKWELL_HEAD_DIM} features on this GPU"
    if kernel.package and name in machine.missing:
        return f"needs {kernel.package}, which cannot be imported ({machine.missing[name]})"
    return ""


def choose_attention(config: Config, shape: ModelShape, machine: Machine) -> Choice:
    """The kernel of a run: the one asked for, or what "auto" stands for here. A function of its arguments alone.

    Raises:
        ConfigError: the kernel that was asked for cannot run on this machine.
    """
    name = config.attention.backend
    if name == "auto":
        if machine.device == "cpu":
            return Choice("sdpa")
        passed_over: list[str] = []
        for candidate in AUTO[config.data.document_mask]:
            reasons = [problem for _, problem in _unfit(candidate, config, shape)]
            reason = reasons[0] if reasons else _unfit_on(candidate, shape, machine)
            if not reason:
                return Choice(candidate, tuple(passed_over))
            passed_over.append(f"{candidate} {reason}")
    elif reason := _unfit_on(name, shape, machine):
        fitting = [n for n in KERNELS if not any(_unfit(n, config, shape)) and not _unfit_on(n, shape, machine)]
        install = KERNELS[name].package and name in machine.missing
        remedy = (
            'Install it with pip install -e ".[flash]" on a CUDA host, or choose one that runs'
            if install
            else ("Backends that run")
        )
        raise ConfigError(f'attention.backend = "{name}" {reason}. {remedy} here: {", ".join(fitting)}.')
    return Choice(name)
