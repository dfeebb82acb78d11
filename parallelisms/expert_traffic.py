"""How many rows the ranks of expert parallelism sent each other."""

import re

from torch import nn

from parallelisms import process_group
from parallelisms.dispatch_all_to_all import AllToAll
from parallelisms.expert_parallel import TokenShare
from parallelisms.names import plain_name

Traffic = dict[str, list[list[int | None]]]


def expert_traffic(model: nn.Module) -> Traffic:
    """{"sent": layers x ranks, "received": layers x ranks}: rows to and from *other* ranks in the latest training
    micro-batch, MoE layers in order, ranks of the whole job in order. None: another pipeline stage holds the layer.

    Every rank calls it. Nothing is read from the device: a dispatcher learns the numbers before it sends.
    """
    mine: dict[int, tuple[int, int]] = {}
    for name, module in model.named_modules():
        dispatcher = getattr(module, "dispatcher", None)
        if isinstance(dispatcher, TokenShare):
            dispatcher = dispatcher.dispatcher
        if isinstance(dispatcher, AllToAll) and (layer := re.match(r"layers\.(\d+)\.", plain_name(name))):
            mine[int(layer[1])] = (dispatcher.rows_sent, dispatcher.rows_received)
    everyone = process_group.gather(mine)
    layers = sorted({layer for held in everyone for layer in held})
    return {
        kind: [[held[layer][i] if layer in held else None for held in everyone] for layer in layers]
        for i, kind in enumerate(("sent", "received"))
    }


def traffic_tags(traffic: Traffic) -> dict[str, float]:
    """``moe/rows_sent``, the mean over layers and the ranks that hold them, and ``moe/rows_received_max``, the most
    that a rank received; nothing without expert parallelism.
    """
    if not traffic:
        return {}
    sent, received = ([n for layer in traffic[kind] for n in layer if n is not None] for kind in ("sent", "received"))
    return {"moe/rows_sent": sum(sent) / len(sent), "moe/rows_received_max": float(max(received))}
