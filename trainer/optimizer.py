"""The optimizer a configuration asks for, with norms, biases and embeddings outside weight decay by option."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from config.schema import Optimizer
from trainer.adamw import AdamW

logger = logging.getLogger(__name__)


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    section: Optimizer,
    *,
    seed: int = 0,
    backend: str | None = None,
) -> torch.optim.Optimizer:
    """An optimizer over ``named_parameters``: (module path, parameter) as ``model.named_parameters()`` gives them.

    A parameter is left out of weight decay when one of its names is of a kind in ``section.weight_decay_skip``; a tied
    parameter given under both its names is so under either. Parameters also form separate groups by device mesh,
    because foreach and fused kernels take no list in which meshes, or sharded and plain tensors, are mixed. Frozen
    parameters are left out. Ends in one log line.

    Args:
        seed: of stochastic rounding.
        backend: of torch.compile, for AdamW's update; None: not compiled.
    """
    parameters: dict[int, torch.nn.Parameter] = {}
    kept: set[int] = set()
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            parameters[id(parameter)] = parameter
            if kind_of(name, parameter) in section.weight_decay_skip:
                kept.add(id(parameter))

    groups: dict[Any, dict[str, Any]] = {}
    for key, parameter in parameters.items():
        decay = 0.0 if key in kept else section.weight_decay
        mesh = getattr(parameter, "device_mesh", None)
        groups.setdefault((decay, mesh), {"params": [], "weight_decay": decay})["params"].append(parameter)

    implementation: str = section.implementation
    if section.name == "SGD" and implementation == "fused":
        implementation = "foreach"  # DTensor has no sharding rule for fused SGD (torch 2.13)
    shared: dict[str, Any] = {
        "lr": section.lr,
        "foreach": implementation == "foreach",
        "fused": implementation == "fused",
    }
    optimizer: torch.optim.Optimizer
    adam = {"lr": section.lr, "betas": (section.beta1, section.beta2), "eps": section.eps}
    if section.name == "AdamW" and (section.state_dtype == "bfloat16" or backend is not None):
        rounded = section.state_dtype == "bfloat16" and section.stochastic_rounding
        implementation = (
            f"{section.state_dtype} moments{', stochastic rounding' * rounded}{', compiled' * bool(backend)}"
        )
        optimizer = AdamW(
            list(groups.values()),
            state_dtype=getattr(torch, section.state_dtype),
            stochastic_rounding=rounded,
            seed=seed,
            backend=backend,
            **adam,
        )
    elif section.name == "SGD":
        optimizer = torch.optim.SGD(list(groups.values()), **shared)
    else:
        kind = torch.optim.AdamW if section.name == "AdamW" else torch.optim.Adam
        optimizer = kind(list(groups.values()), **adam | shared)

    logger.info(
        "Applied %s (%s): lr %g, weight decay %g on %s parameters, none on %s",
        section.name,
        implementation,
        section.lr,
        section.weight_decay,
        f"{sum(p.numel() for key, p in parameters.items() if key not in kept):,}",
        f"{sum(p.numel() for key, p in parameters.items() if key in kept):,}",
    )
    return optimizer


def kind_of(name: str, parameter: torch.Tensor) -> str:
    """ "norm", "bias", "embedding" or "weight": what optimizer.weight_decay_skip calls the parameter of this name."""
    *path, leaf = name.split(".")
    module = path[-1] if path else ""
    if leaf.endswith("bias"):
        return "bias"
    if module == "tok_embeddings":
        return "embedding"
    if parameter.ndim == 1 and "norm" in module:
        return "norm"
    return "weight"
