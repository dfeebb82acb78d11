"""Which switches would lower the estimated peak of a configuration most, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from config.errors import ConfigError
from config.estimate import estimate, provenance
from config.keys import shown
from config.load import flatten, from_flat
from config.rules import check
from config.schema import Config
from config.world import derived

SWITCHES: dict[str, tuple[dict[str, Any], ...]] = {
    "activations": (
        {"activation_checkpoint.mode": "full", "activation_checkpoint.offload": False},
        {
            "activation_checkpoint.mode": "selective",
            "activation_checkpoint.selective_ac_option": "op",
            "activation_checkpoint.offload": False,
        },
        {"activation_checkpoint.mode": "experts", "activation_checkpoint.offload": False},
    ),
    "activations elsewhere": ({"activation_checkpoint.offload": True},),
    "loss": ({"loss.implementation": "row_chunked"}, {"loss.implementation": "vocab_chunked"}),
    "moments": ({"optimizer.state_dtype": "bfloat16"},),
    "states": ({"optimizer.state_offload": True}, {"training.enable_cpu_offload": True}),
    "compiler": ({"compile.enable": True, "compile.components": ["model", "loss"]},),
    "update": ({"optimizer.implementation": "fused"},),
}
"""What a switch is about -> the ways to set it, of which the best is named. All run wherever a GPU is; what needs a
package or a newer card is not among them."""


@dataclass(frozen=True)
class Switch:
    """Keys to change, and the estimated peak in bytes with them changed."""

    changes: dict[str, Any]
    peak: int
    saved: int
    """Bytes below the configuration as it is."""

    @property
    def words(self) -> str:
        """The changes as they are written in a TOML."""
        return ", ".join(f"{key} = {shown(value)}" for key, value in self.changes.items())


def advice(config: Config, world_size: int, most: int = 3) -> list[Switch]:
    """At most ``most`` switches, the best first, one of a kind; those that save nothing by themselves are left out.

    A switch that the rules refuse beside the rest of ``config`` is none. Half the micro-batch, with as many sequences a
    step, is one.

    Raises:
        ConfigError: as :func:`config.estimate.estimate`, of ``config`` itself.
    """
    now, flat = estimate(config, world_size).peak, flatten(config)
    best: list[Switch] = []
    for ways in (*SWITCHES.values(), tuple(_half_the_batch(config, world_size))):
        found = [switch for changes in ways if (switch := _with(flat, changes, world_size, now)) is not None]
        if found:
            best.append(max(found, key=lambda switch: switch.saved))
    return sorted(best, key=lambda switch: -switch.saved)[:most]


def _half_the_batch(config: Config, world_size: int) -> Iterator[dict[str, Any]]:
    size = config.training.local_batch_size
    if size % 2 == 0:
        whole = config.training.global_batch_size
        from_rule = {} if whole != -1 else {"training.global_batch_size": _sequences(config, world_size)}
        yield {"training.local_batch_size": size // 2, **from_rule}


def _sequences(config: Config, world_size: int) -> int:
    return derived(config, world_size)["global_batch_size"].value


def _with(flat: dict[str, Any], changes: dict[str, Any], world_size: int, now: int) -> Switch | None:
    """``flat`` with ``changes``; None if that is refused, is what it was, or saves nothing."""
    new = {key: value for key, value in changes.items() if flat[key] != value}
    try:
        changed = from_flat(flat | new)
        check(changed, {})
        peak = estimate(changed, world_size).peak
    except ConfigError:
        return None
    return Switch(new, peak, now - peak) if new and now - peak > now // 1000 else None


def advice_sentence(config: Config, world_size: int) -> str:
    """The advice after a report that memory ran out, "; ..."; empty if no switch helps."""
    switches = advice(config, world_size)
    if not switches:
        return ""
    listed = ", ".join(f"{switch.words} ({switch.saved / 2**30:.2f} GiB)" for switch in switches)
    return f"; by the estimate ({provenance()}) these would save most of the peak, each by itself: {listed}"
