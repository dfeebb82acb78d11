"""Which attention kernel a run gets on this machine."""

import functools
import logging

import torch

from config.attention import KERNELS, Choice, Machine, choose_attention
from config.flavors import resolve_shape
from config.schema import Config

logger = logging.getLogger(__name__)


@functools.cache
def machine(device: str) -> Machine:
    """What a choice of kernel depends on, of the current machine. ``device``: "cpu" or "cuda"."""
    if device == "cpu":
        return Machine("cpu")
    problems = {name: import_problem(name) for name, kernel in KERNELS.items() if kernel.package}
    capability = torch.cuda.get_device_capability()[0]
    return Machine(device, capability, {name: problem for name, problem in problems.items() if problem})


def import_problem(name: str) -> str:
    """Why the package of a backend cannot be imported; empty if it can."""
    try:
        if name == "flash2":
            import flash_attn.flash_attn_interface
        else:
            import flash_attn.cute.interface  # noqa: F401
    except Exception as error:  # a kernel library built for another torch fails in ways of its own
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def attention_of(config: Config, device: str) -> Choice:
    """The kernel of ``config`` on this machine, "auto" resolved.

    Raises:
        ConfigError: the kernel that was asked for cannot run here.
    """
    return choose_attention(config, resolve_shape(config.model, config.moe), machine(device))
