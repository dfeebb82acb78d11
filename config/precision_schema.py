"""Keys of precision and of what executes the update: [optimizer], [compile] and [quantize].

Names and defaults of [compile] and [quantize] are torchtitan 0.2.2's. See config/schema.py for how a schema is written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from config.field import key

LINEAR = "quantize.linear.float8"
GROUPED = "quantize.grouped_mm.float8"
_LINEAR: dict[str, Any] = {"parent": "model.converters", "parent_values": ([LINEAR],)}
_GROUPED: dict[str, Any] = {"parent": "model.converters", "parent_values": ([GROUPED],)}


@dataclass
class Optimizer:
    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    """Optimizer. SGD is plain (no momentum), for parity tests."""
    lr: float = key(8e-4, minimum=0.0)
    """Peak learning rate."""
    beta1: float = key(0.9, minimum=0.0, maximum=1.0, parent="optimizer.name", parent_values=("AdamW", "Adam"))
    """Decay of the first moment."""
    beta2: float = key(0.95, minimum=0.0, maximum=1.0, parent="optimizer.name", parent_values=("AdamW", "Adam"))
    """Decay of the second moment."""
    eps: float = key(1e-8, minimum=0.0, parent="optimizer.name", parent_values=("AdamW", "Adam"))
    """Added to the root of the second moment."""
    weight_decay: float = key(0.1, minimum=0.0)
    """Weight decay."""
    weight_decay_skip: list[Literal["norm", "bias", "embedding"]] = key(factory=list)
    """Kinds of parameter left out of weight decay. Empty: every parameter decays, as in torchtitan."""
    implementation: Literal["for-loop", "foreach", "fused"] = key(
        "fused", parent="optimizer.name", parent_values=("AdamW", "Adam")
    )
    """How the update is executed. SGD always runs foreach."""
    state_dtype: Literal["float32", "bfloat16"] = key("float32", parent="optimizer.name", parent_values=("AdamW",))
    """Dtype in which both moments are kept between steps; the update is computed in float32."""
    stochastic_rounding: bool = key(False, parent="optimizer.state_dtype", parent_values=("bfloat16",))
    """Round moments up or down by chance, so that they are right on average. Off: to the nearest."""
    state_offload: bool = key(False, parent="optimizer.name", parent_values=("AdamW", "Adam"))
    """Keep both moments in CPU memory. An update has those of some parameters on the device at a time."""


@dataclass
class Compile:
    enable: bool = False
    """torch.compile, per Transformer block."""
    components: list[Literal["model", "loss", "optimizer"]] = key(
        factory=lambda: ["model", "loss"], parent="compile.enable", parent_values=(True,)
    )
    """What to compile. "optimizer": AdamW's update, one kernel a parameter in place of optimizer.implementation."""
    backend: str = key("inductor", parent="compile.enable", parent_values=(True,))
    """torch.compile backend."""


@dataclass
class Float8Linear:
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = key("tensorwise", **_LINEAR)
    """One scale a tensor, one a row, or one a row with gradients of weights left in the compute dtype."""
    filter_fqns: list[str] = key(factory=list, **_LINEAR)
    """Parts of paths to leave out. "auto_filter_small_kn": those too small to gain. Head and routers are never in."""
    enable_fsdp_float8_all_gather: bool = key(False, **_LINEAR)
    """Gather weights in float8 under FSDP2. Tensorwise alone."""
    precompute_float8_dynamic_scale_for_fsdp: bool = key(
        False, parent="quantize.linear.float8.enable_fsdp_float8_all_gather", parent_values=(True,)
    )
    """Find the scales of all weights by one reduction after each optimizer step, not by one a weight."""
    emulate: bool = key(False, **_LINEAR)
    """Round to float8 and multiply in float32: the same numbers on any device, slowly. Without compiled blocks."""


@dataclass
class QuantizedLinear:
    float8: Float8Linear = field(default_factory=Float8Linear)


@dataclass
class Float8GroupedMM:
    fqns: list[str] = key(factory=list, **_GROUPED)
    """Parts of paths of the experts to convert. ["experts"]: those of every layer. Shared experts are linear layers."""
    recipe_name: Literal["rowwise", "rowwise_with_gw_hp"] = key("rowwise", **_GROUPED)
    """One scale a row. with_gw_hp: gradients of experts' matrices are computed in the compute dtype."""
    emulate: bool = key(False, **_GROUPED)
    """Round to float8 and multiply in float32: the same numbers on any device, slowly."""


@dataclass
class QuantizedGroupedMM:
    float8: Float8GroupedMM = field(default_factory=Float8GroupedMM)


@dataclass
class Quantize:
    linear: QuantizedLinear = field(default_factory=QuantizedLinear)
    grouped_mm: QuantizedGroupedMM = field(default_factory=QuantizedGroupedMM)
