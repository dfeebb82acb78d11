"""AdamW (Loshchilov & Hutter, arXiv 1711.05101) whose moments may be bfloat16, as one function that compiles.

The update is computed in float32, with torch's own operations in torch's order: with float32 moments it equals
torch.optim.AdamW bit for bit where both run eagerly on a CPU. DeepSeek-V3 (arXiv 2412.19437) trains with such moments.

Names of states and options are those of torch.optim.AdamW, so that a run may go on with either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from trainer.rounding import random_bits, rounding_key, stochastic_bfloat16

EAGER_ELEMENTS = 1 << 24
"""Elements updated at once where nothing is compiled: intermediate results are of this size, not of the parameter's."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def update(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    decay: torch.Tensor,
    step_size: torch.Tensor,
    correction: torch.Tensor,
    key: torch.Tensor,
    first: int,
    beta1: float,
    beta2: float,
    eps: float,
    stochastic: bool,
) -> None:
    """One step of one parameter, in place. All tensors are flat and of one size; scalars that change are tensors, or
    every step would be compiled anew.

    Args:
        mean, square: both moments.
        decay: float32, 1 - learning rate x weight decay.
        step_size: float32, minus the learning rate over the first moment's bias correction.
        correction: float32, root of the second moment's.
        key: int64, of this parameter and step.
        first: how many of the parameter's elements precede these.
        stochastic: round moments by chance.
    """
    grad = grad.float()
    new_mean = torch.lerp(mean.float(), grad, 1 - beta1)
    new_square = square.float().mul(beta2).addcmul(grad, grad, value=1 - beta2)
    denominator = (new_square.sqrt() / correction).add(eps)
    parameter.copy_(parameter * decay + step_size * new_mean / denominator)
    if stochastic:
        bits = random_bits(key, first, parameter)
        mean.copy_(stochastic_bfloat16(new_mean, bits))
        square.copy_(stochastic_bfloat16(new_square, bits >> 16))
    else:
        mean.copy_(new_mean)
        square.copy_(new_square)


class AdamW(torch.optim.AdamW):
    """AdamW with moments in ``state_dtype``.

    Args:
        params: parameters or groups, plain or DTensors, float32.
        state_dtype: of both moments.
        stochastic_rounding: round moments to bfloat16 by chance, not to the nearest.
        seed: of these chances.
        backend: of torch.compile; None: eager.
        defaults: options of torch.optim.AdamW; those about its own execution are kept and not read.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        state_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = False,
        seed: int = 0,
        backend: str | None = None,
        **defaults: Any,
    ):
        self.options = {  # of a copy of this optimizer, as ZeRO stage 1 makes one
            "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "backend": backend,
        }
        super().__init__(params, **defaults)
        self._update: Callable[..., None] = update
        if backend is not None:
            self._update = torch.compile(update, backend=backend, dynamic=True, fullgraph=True)
        self._keys: dict[torch.Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=self.options["state_dtype"])
        state["step"] += 1
        step, lr, (beta1, beta2) = state["step"].item(), float(group["lr"]), group["betas"]
        scalars = (
            torch.tensor(1 - lr * group["weight_decay"]),
            torch.tensor(-lr / (1 - beta1**step)),
            torch.tensor((1 - beta2**step) ** 0.5),
            torch.tensor(rounding_key(self._key(parameter), int(step))),
        )
        tensors = [_flat(x) for x in (parameter, parameter.grad, *(state[name] for name in MOMENTS))]
        constants = (beta1, beta2, group["eps"], self.options["stochastic_rounding"])
        if self.options["backend"] is not None:
            if tensors[0].numel():
                self._update(*tensors, *scalars, 0, *constants)
            return
        for first in range(0, tensors[0].numel(), EAGER_ELEMENTS):
            part = (x[first : first + EAGER_ELEMENTS] for x in tensors)
            self._update(*part, *scalars, first, *constants)

    def _key(self, parameter: torch.Tensor) -> int:
        """Of the parameter and of the piece of it that is here: copies on other ranks have the same."""
        if parameter not in self._keys:
            order = [p for group in self.param_groups for p in group["params"]]
            number = next(i for i, p in enumerate(order) if p is parameter)
            piece: list[int] = []
            if isinstance(parameter, DTensor):
                place = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
                piece = [coordinate for coordinate, placement in place if not placement.is_replicate()]
            self._keys[parameter] = rounding_key(self.options["seed"], number, *piece)
        return self._keys[parameter]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which turns moments into the dtype of the parameter; here they keep their own."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()  # read each step; a fused optimizer keeps it on the device
            for name in MOMENTS:
                state[name] = state[name].to(self.options["state_dtype"])


def _flat(x: torch.Tensor) -> torch.Tensor:
    """This rank's elements, flat, in the same storage. (torchao's weights that FSDP2 gathers in float8 wrap it.)

    ``data`` forgets what it is a view of, whose shape a compiled update would look at.
    """
    local = x.to_local() if isinstance(x, DTensor) else x
    return getattr(local, "_tensor", local).view(-1).data
