"""What may be spread how: refusals, notes, and what one key of a layout decides about another."""

from __future__ import annotations

from collections.abc import Iterator

from config.errors import ConfigError
from config.flavors import resolve_shape
from config.keys import value_of
from config.loss import check_liger_on
from config.profiling_rules import check_profiling_on
from config.refusal import Said
from config.refused_layouts import REFUSED
from config.schema import Config
from config.shapes import ModelShape


def layout_rules(config: Config, shape: ModelShape, said: Said) -> Iterator[str]:
    """What is refused of ``config``, a sentence or two each."""
    for refusal in REFUSED:
        if problem := refusal.finds(config, shape, said):
            yield f"{problem}: {refusal.reason}"


def layout_notes(config: Config) -> Iterator[str]:
    """What is allowed and has no effect, a sentence each."""
    section = config.parallelism
    for name in ("disable_loss_parallel", "enable_async_tensor_parallel"):
        if getattr(section, name) and section.tensor_parallel_degree == 1:
            yield f"parallelism.{name} = true has no effect: parallelism.tensor_parallel_degree = 1"


def expert_notes(config: Config, shape: ModelShape) -> Iterator[str]:
    """What of expert parallelism is set and has no effect."""
    degree = config.parallelism.expert_parallel_degree
    if degree > 1 and shape.moe is None:
        flavor = config.model.flavor
        yield f"parallelism.expert_parallel_degree = {degree} has no effect: flavor {flavor} has no experts"
    if degree == 1 and shape.moe is not None:
        for name, default in (("dispatcher", "all_to_all"), ("comm_overlap", "none")):
            if getattr(config.moe, name) != default:
                yield (
                    f'moe.{name} = "{getattr(config.moe, name)}" has no effect: parallelism.expert_parallel_degree = 1'
                )


def check_layout_on(config: Config, device: str, torch_version: str) -> None:
    """Check what only the machine can tell. ``device``: "cpu" or "cuda".

    Raises:
        ConfigError: asynchronous tensor parallelism, Liger's kernels or memory snapshots without a GPU; compiled
            float32 experts on an older torch.
    """
    check_profiling_on(config, device)
    check_liger_on(config, device)
    if config.parallelism.enable_async_tensor_parallel and device != "cuda":
        raise ConfigError(
            "parallelism.enable_async_tensor_parallel = true, and this machine has no GPU: torch overlaps through"
            " memory that GPUs share. Set it to false."
        )
    for full in ("activation_checkpoint.offload", "training.enable_cpu_offload", "optimizer.state_offload"):
        if device == "cpu" and value_of(config, full):
            raise ConfigError(
                f"{full} = true, and this machine has no GPU: what would be moved to CPU memory is there. Set it to"
                " false."
            )
    compiled = config.compile.enable and "model" in config.compile.components
    experts = resolve_shape(config.model, config.moe).moe is not None
    version = tuple(int(part) for part in torch_version.split(".")[:2])
    if compiled and experts and config.training.mixed_precision_param == "float32" and version < (2, 13):
        # Seen on 2.11: zero gradients of w13 and w2, no error. bfloat16 takes another kernel and is right there.
        raise ConfigError(
            f'compile.enable = true with experts, training.mixed_precision_param = "float32" on torch {torch_version}'
            ": their gradients are silently zero before torch 2.13. Use bfloat16, or do not compile the model."
        )
