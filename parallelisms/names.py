"""Names of parameters and modules as the model's author wrote them, whatever has wrapped them since."""

from collections.abc import Iterator

import torch
from torch import nn

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """``name`` without the parts that activation checkpointing and torch.compile put in."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """``model.named_parameters()`` under plain names; a tied parameter comes once, under its first name."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter
