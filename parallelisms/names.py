"""Names of parameters and modules as the model's author wrote them, whatever has wrapped them since."""

import re
from collections.abc import Iterator

import torch
from torch import nn

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.|^stages\.\d+\.")


def plain_name(name: str) -> str:
    """``name`` without what activation checkpointing, torch.compile and the split into pipeline stages put in."""
    return _WRAPPERS.sub("", name)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """``model.named_parameters()`` under plain names; a tied parameter comes once, under its first name."""
    for name, parameter in model.named_parameters():
        yield plain_name(name), parameter
