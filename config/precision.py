"""Rules of precision: what is multiplied in float8, in what moments are kept, and what that goes with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from config.errors import ConfigError
from config.flavors import resolve_shape
from config.keys import did_you_mean, shown
from config.precision_schema import GROUPED, LINEAR
from config.refusal import Said, compiled, compiles, tensor_parallel, without_fsdp2, zero_bubble
from config.schema import Config
from config.shapes import ModelShape, MoEShape

SMALL = "auto_filter_small_kn"
"""torchtitan's word in filter_fqns for "leave out what is too small to gain"."""
NEVER = ("output", "router")
"""Parts of paths that stay as they are: a rounded logit or routing decision costs more than its product saves."""
FLOAT8_CAPABILITY = (8, 9)
GROUPED_CAPABILITY = (9, 0)
"""torch builds its rowwise float8 grouped product for Hopper alone (ScaledGroupMM.cu, arch::Sm90)."""


def float8_linears(config: Config) -> bool:
    """Whether linear layers multiply in float8."""
    return LINEAR in config.model.converters


def precomputes_scales(config: Config) -> bool:
    """Whether each update is followed by finding the scales of all weights."""
    float8 = config.quantize.linear.float8
    wanted = float8.enable_fsdp_float8_all_gather and float8.precompute_float8_dynamic_scale_for_fsdp
    return float8_linears(config) and wanted


def in_float8(path: str, rows: int, columns: int, filter_fqns: Sequence[str], recipe: str) -> bool:
    """Whether the linear layer at ``path``, with a matrix of ``rows`` x ``columns``, is converted.

    Both sizes are multiples of 16, which the tensor cores want. Below the sizes of SMALL, torchao's measurements on
    H100 saw the casts cost more than the product gains.
    """
    if rows % 16 or columns % 16 or any(part in path for part in (*NEVER, *filter_fqns)):
        return False
    if SMALL not in filter_fqns:
        return True
    if recipe == "tensorwise":
        return columns > 4096 or rows > 1024
    return rows > 2048 and columns > 1024 and (rows > 4096 or columns > 2048)


def float8_experts(config: Config) -> bool:
    """Whether experts multiply in float8."""
    return GROUPED in config.model.converters


def in_float8_experts(config: Config, path: str) -> bool:
    """Whether the experts at ``path`` are converted."""
    return float8_experts(config) and any(part in path for part in config.quantize.grouped_mm.float8.fqns)


def linear_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Path inside a block -> (rows, columns) of every linear layer that is not a router."""
    dim, q, kv = shape.dim, shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    found = {
        **{f"attention.{name}": (rows, dim) for name, rows in (("wq", q), ("wk", kv), ("wv", kv))},
        "attention.wo": (dim, q),
    }
    widths = {"feed_forward": shape.hidden_dim}
    if shape.moe:
        dense = any(not shape.moe.has_experts(i) for i in range(shape.n_layers))
        widths = {"feed_forward": shape.hidden_dim * dense, "moe.shared_experts": shape.moe.shared_dim}
    for path, hidden in widths.items():
        if hidden:
            found |= {f"{path}.w1": (hidden, dim), f"{path}.w3": (hidden, dim), f"{path}.w2": (dim, hidden)}
    return found


def precision_rules(config: Config, shape: ModelShape, said: Said) -> Iterator[str]:
    """What is wrong, a sentence or two each."""
    if compiles(config, "optimizer") and config.optimizer.name != "AdamW":
        yield f"{said('compile.components')} with {said('optimizer.name')}: AdamW's update alone is compiled."
    if config.optimizer.state_dtype == "bfloat16" and config.optimizer.name != "AdamW":
        yield (
            f"{said('optimizer.state_dtype')} with {said('optimizer.name')}: AdamW alone keeps its moments in bfloat16."
        )
    for name in config.model.converters:
        if name not in (LINEAR, GROUPED):
            known = [LINEAR, GROUPED]
            yield (
                f"{said('model.converters')}: there is no converter {shown(name)}{did_you_mean(name, known)}; known:"
                f" {', '.join(known)}."
            )
    if float8_linears(config):
        yield from _linear_rules(config, shape, said)
    if float8_experts(config) and shape.moe is not None:
        yield from _expert_rules(config, shape, shape.moe, said)


def _expert_rules(config: Config, shape: ModelShape, moe: MoEShape, said: Said) -> Iterator[str]:
    """Of experts in float8. A dense shape leaves them unread, as it does [moe]."""
    float8, on, section = config.quantize.grouped_mm.float8, said("model.converters"), config.parallelism
    paths = [f"layers.{i}.moe.experts" for i in range(shape.n_layers) if moe.has_experts(i)]
    if not any(in_float8_experts(config, path) for path in paths):
        yield (
            f"{on} converts nothing: no path of experts ({paths[0]}, ...) has a part of"
            f' {said("quantize.grouped_mm.float8.fqns")}. Set it to ["experts"], or remove the converter.'
        )
    if shape.dim % 16 or moe.hidden_dim % 16:
        yield (
            f"{on} with {said('model.dim')} and {said('moe.hidden_dim')}: float8 products want multiples of 16."
            " Change the size, or remove the converter."
        )
    if config.moe.experts != "grouped_mm":
        yield f'{on} with {said("moe.experts")}: it is the grouped products that take float8. Use "grouped_mm".'
    if not float8.emulate and config.training.mixed_precision_param != "bfloat16":
        yield (
            f"{on} with {said('training.mixed_precision_param')}: float8 products give bfloat16. Set it to"
            ' "bfloat16", or quantize.grouped_mm.float8.emulate = true.'
        )
    whole = section.expert_parallel_degree > 1 and section.expert_tensor_parallel_degree == 1
    if tensor_parallel(config) and not whole:
        yield (
            f"{on} with {said('parallelism.tensor_parallel_degree')}: a rank would have a part of each expert's hidden"
            " features, and a scale of its own for it, so results would be those of the layout. Use expert parallelism"
            " with expert_tensor_parallel_degree = 1, or bfloat16."
        )


def _linear_rules(config: Config, shape: ModelShape, said: Said) -> Iterator[str]:
    """Of linear layers in float8."""
    float8, on = config.quantize.linear.float8, said("model.converters")
    if not any(in_float8(p, *size, float8.filter_fqns, float8.recipe_name) for p, size in linear_shapes(shape).items()):
        yield (
            f"{on} converts nothing: every linear layer of this shape is left out. Sizes are multiples of 16;"
            f" {said('quantize.linear.float8.filter_fqns')}. Choose another shape or filter, or no converters."
        )
    if tensor_parallel(config):
        yield (
            f"{on} with {said('parallelism.tensor_parallel_degree')}: torchao scales a matrix that is cut over ranks"
            " only under parallel styles of its own, which are not part of this project. Use FSDP2, or bfloat16."
        )
    if zero_bubble(config):
        yield (
            f"{on} with {said('parallelism.pipeline_parallel_schedule')}: taking gradients of inputs and of weights"
            " apart runs a float8 layer's backward pass twice, and with it every cast. Use a schedule that does not."
        )
    if float8.enable_fsdp_float8_all_gather:
        key = said("quantize.linear.float8.enable_fsdp_float8_all_gather")
        if float8.recipe_name != "tensorwise":
            yield f"{key} with {said('quantize.linear.float8.recipe_name')}: one scale a tensor can be gathered alone."
        if without_fsdp2(config):
            yield f"{key}, and FSDP2 holds nothing in this layout. Set it to false, or shard."
    if float8.emulate and compiles(config, "model"):
        yield (
            f"{said('quantize.linear.float8.emulate')} with {said('compile.enable')}: torchao's emulation does not"
            ' compile. Leave "model" out of compile.components.'
        )


def precision_notes(config: Config, shape: ModelShape) -> Iterator[str]:
    """What is allowed and may surprise, a sentence each."""
    if float8_experts(config) and shape.moe is None:
        yield f'model.converters: "{GROUPED}" has no effect: flavor {config.model.flavor} has no experts'
    if float8_linears(config) and not config.quantize.linear.float8.emulate and not compiled(config):
        yield (
            "float8 without compiled blocks is slower than bfloat16: the casts are passes over memory of their own."
            " Set compile.enable = true"
        )


def check_float8_on(config: Config, device: str, capability: tuple[int, int], problem: str) -> None:
    """Check what only the machine can tell, of a configuration with float8 linear layers or experts.

    Args:
        device: "cpu" or "cuda".
        capability: of the GPU.
        problem: why torchao cannot be imported; empty if it can. Experts do not need it.

    Raises:
        ConfigError: linear layers without torchao, or a device that does not have these products in float8.
    """
    products = float8_experts(config) and resolve_shape(config.model, config.moe).moe is not None
    if products and not config.quantize.grouped_mm.float8.emulate and capability != GROUPED_CAPABILITY:
        what = "a CPU does" if device == "cpu" else f"this GPU ({capability[0]}.{capability[1]}) does"
        raise ConfigError(
            f'model.converters = ["{GROUPED}"]: {what} not have grouped products in float8; compute capability 9.0'
            " (Hopper) does. For the same numbers in float32, slowly, set quantize.grouped_mm.float8.emulate = true."
        )
    if not float8_linears(config):
        return
    if problem:
        raise ConfigError(
            f'model.converters = ["{LINEAR}"] needs torchao, which cannot be imported ({problem}). Install it with'
            ' pip install -e ".[float8]", or remove the converter.'
        )
    if not config.quantize.linear.float8.emulate and (device == "cpu" or capability < FLOAT8_CAPABILITY):
        what = "a CPU does not" if device == "cpu" else f"this GPU ({capability[0]}.{capability[1]}) does not"
        raise ConfigError(
            f'model.converters = ["{LINEAR}"]: {what} multiply in float8; compute capability 8.9 or newer does. For the'
            " same numbers in float32, slowly, set quantize.linear.float8.emulate = true and do not compile the model."
        )
