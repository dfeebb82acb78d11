"""Linear layers that multiply in float8, by torchao. Parameters stay as they are: float32, under the same names.

Operands are cast just before each product, scaled so that their largest magnitude fills the format (Micikevicius et
al., arXiv 2209.05433): one scale a tensor, or one a row. Router, embedding and head are never converted.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from config.precision import check_float8_on, float8_linears, in_float8
from config.schema import Config

logger = logging.getLogger(__name__)


def check_float8(config: Config, device: str) -> None:
    """ConfigError: this machine cannot do the float8 that ``config`` asks for. ``device``: "cpu" or "cuda"."""
    if config.model.converters:
        capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
        check_float8_on(config, device, capability, torchao_problem() if float8_linears(config) else "")


@functools.cache
def torchao_problem() -> str:
    """Why torchao's float8 cannot be imported; empty if it can."""
    try:
        import torchao.float8  # noqa: F401
    except Exception as error:  # built for another torch it fails in ways of its own
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def apply_float8(
    model: nn.Module, *, recipe: str, filter_fqns: Sequence[str], all_gather: bool = False, emulate: bool = False
) -> None:
    """Convert the linear layers of ``model`` in place.

    Args:
        model: nothing wraps its modules yet; parameters may be on the meta device.
        recipe: "tensorwise", "rowwise", or "rowwise_with_gw_hp" (gradients of weights in the compute dtype).
        filter_fqns: see :func:`config.precision.in_float8`.
        all_gather: weights become tensors that FSDP2 casts before it gathers them: a quarter of float32's bytes.
        emulate: cast, and multiply what was cast in float32.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def chosen(module: nn.Module, path: str) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        return in_float8(path, module.out_features, module.in_features, filter_fqns, recipe)

    if recipe == "rowwise":
        # Fused casts keep more digits than eager ones, and rounded scales then differ between passes (pytorch #150859).
        torch._inductor.config.emulate_precision_casts = True
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), enable_fsdp_float8_all_gather=all_gather, emulate=emulate
    )
    linears = [module for path, module in model.named_modules() if chosen(module, path)]
    convert_to_float8_training(model, config=config, module_filter_fn=chosen)
    logger.info(
        "Applied float8 (%s) to %d linear layers%s%s",
        recipe,
        len(linears),
        ", gathered in float8" if all_gather else "",
        ", emulated" if emulate else "",
    )


def precompute_scales(model: nn.Module) -> None:
    """Find the scale of every weight that is gathered in float8, by one reduction. Call it after each update."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def plain_weight(value: Any) -> Any:
    """A weight without torchao's class around its storage, which is shared: what a checkpoint of any layout holds."""
    if isinstance(value, DTensor):
        local = value.to_local()
        inner = plain_weight(local)
        if inner is not local:
            return DTensor.from_local(
                inner, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
            )
        return value
    is_wrapped = isinstance(value, torch.Tensor) and hasattr(value, "fsdp_pre_all_gather")
    return value._tensor if is_wrapped else value
