"""Optimizer states in CPU memory, on the device only for the update of their parameters.

AdamW keeps two float32 numbers a parameter that nothing reads between updates. Here they wait in pinned memory. An
update goes through the parameters in pieces: the states of a piece come to the device while the piece before is
updated, and leave while the next one is: three pieces are there at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from config.memory import PIECE_BYTES

logger = logging.getLogger(__name__)

States = dict[torch.Tensor, dict[str, torch.Tensor]]
"""Parameter -> name -> state of its shape."""


class OffloadedStates(torch.optim.Optimizer):
    """``optimizer`` with every state that has its parameter's shape in CPU memory, and the same results to the bit.

    ``state`` holds those as tensors like the parameters are (DTensors under FSDP2), so a checkpoint is that of any
    other run.

    Args:
        optimizer: updates each parameter by itself. It has not taken a step.
        piece_bytes: states that are updated at once, at most.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, piece_bytes: int = PIECE_BYTES):
        self.whole = optimizer  # nothing is kept here: not what Optimizer.__init__ sets up
        self.piece_bytes = piece_bytes
        self.host: States = {}
        self._inward, self._outward = _Copies(), _Copies()
        logger.info("Applied offload of optimizer states to CPU memory")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.whole.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.whole.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.whole.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.whole.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        groups, pieces = self.whole.param_groups, self._pieces()
        leaving: States = {}
        coming, arrived = self._fetch(pieces[0]["params"]) if pieces else ({}, None)
        try:
            for i, piece in enumerate(pieces):
                here, awaited = coming, arrived
                if i + 1 < len(pieces):
                    coming, arrived = self._fetch(pieces[i + 1]["params"])
                _compute_after(awaited)
                for parameter, states in here.items():
                    self.whole.state[parameter].update(states)
                del here
                self.whole.param_groups = [piece]
                self.whole.step()
                _compute_after(self._outward.done)  # what left while this piece was updated: its memory is given back
                leaving = self._send(piece["params"])
        finally:
            self.whole.param_groups = groups
        _compute_after(self._outward.done)
        del leaving

    def state_dict(self) -> dict[str, Any]:
        """As of ``optimizer``; waits until states are in CPU memory."""
        if self._outward.done is not None:
            self._outward.done.synchronize()
        return self.whole.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of ``optimizer``, without states passing through the device, where there may be no room."""
        names = (name for group in state_dict["param_groups"] for name in group["params"])
        parameters = dict(zip(names, (p for group in self.param_groups for p in group["params"]), strict=True))
        given, rest = state_dict["state"], {}
        for name, states in given.items():
            rest[name] = {k: v for k, v in states.items() if not _is_like(v, parameters[name])}
        self.whole.load_state_dict({**state_dict, "state": rest})
        for name, states in given.items():
            for key in states.keys() - rest[name].keys():
                host = self._host(parameters[name], key, states[key])
                _local(host).copy_(_local(states[key]))
                self.whole.state[parameters[name]][key] = host

    def _pieces(self) -> list[dict[str, Any]]:
        """The groups cut into smaller ones."""
        found: list[dict[str, Any]] = []
        for group in self.whole.param_groups:
            size = self.piece_bytes
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                needed = 2 * _local(parameter).nbytes
                if size + needed > self.piece_bytes:
                    found.append(group | {"params": []})
                    size = 0
                found[-1]["params"].append(parameter)
                size += needed
        return found

    def _fetch(self, parameters: list[torch.Tensor]) -> tuple[States, torch.cuda.Event | None]:
        """Start copies to the device; before a parameter's first update there are none."""
        found = {
            p: {key: torch.empty_like(p, dtype=host.dtype) for key, host in self.host.get(p, {}).items()}
            for p in parameters
        }
        with self._inward.beside(parameters[0].device):
            for p, states in found.items():
                for key, state in states.items():
                    _local(state).copy_(_local(self.host[p][key]), non_blocking=True)
        return found, self._inward.done

    def _send(self, parameters: list[torch.Tensor]) -> States:
        """Start copies to CPU memory, which ``state`` holds from now on. The originals are to be held until then."""
        originals = {p: {k: v for k, v in self.whole.state[p].items() if _is_like(v, p)} for p in parameters}
        with self._outward.beside(parameters[0].device):
            for p, states in originals.items():
                for key, value in states.items():
                    host = self._host(p, key, value)
                    _local(host).copy_(_local(value), non_blocking=True)
                    self.whole.state[p][key] = host
        return originals

    def _host(self, parameter: torch.Tensor, key: str, like: torch.Tensor) -> torch.Tensor:
        """The tensor in CPU memory for this state; made on first use, its elements to be written."""
        kept = self.host.setdefault(parameter, {})
        if key not in kept:
            local = _local(like).detach()
            host = torch.empty_like(local, device="cpu", pin_memory=parameter.device.type == "cuda")
            if isinstance(like, DTensor):
                whole = like.detach().cpu()
                whole._local_tensor = host  # as FSDP2 does under its CPU offload
                host = whole
            kept[key] = host
        return kept[key]


class _Copies:
    """Copies in one direction, beside what computes. A CPU just copies."""

    def __init__(self) -> None:
        self.done: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Within it, copies run after all that was launched before; then ``done`` is when they have."""
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield
        self.done = self._stream.record_event()


def _compute_after(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _local(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _is_like(state: Any, parameter: torch.Tensor) -> bool:
    return isinstance(state, torch.Tensor) and state.ndim > 0 and state.shape == parameter.shape
