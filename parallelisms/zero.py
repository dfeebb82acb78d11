"""ZeRO stage 1: whole copies of weights and gradients, each optimizer state on one rank only.

(Rajbhandari et al., arXiv 1910.02054, P_os.) Stages 2 and 3 are FSDP2, parallelisms/data_parallel.py.

Checkpoints: torch.distributed.checkpoint cannot read ZeroRedundancyOptimizer, whose own state_dict first gathers
everything on one rank. It need not: each rank's part is an ordinary optimizer over whole parameters
(:func:`holder_of_states`). Every rank saves its part by the parameters' names; together they are the whole model's
states, as any other layout saves them.
"""

import inspect
import logging
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer

logger = logging.getLogger(__name__)


def shard_states(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> ZeroRedundancyOptimizer:
    """``optimizer`` with its states spread over the one-dimensional ``mesh``.

    Whole parameters are handed out, the largest first, each to the rank that has least; ``step`` updates a rank's own
    and then broadcasts them. ``optimizer`` must not have taken a step; its groups and options are kept.
    """
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    options |= getattr(optimizer, "options", {})  # what trainer/adamw.py has beyond torch's
    sharded = ZeroRedundancyOptimizer(
        optimizer.param_groups,
        optimizer_class=type(optimizer),
        process_group=mesh.get_group(),
        parameters_as_bucket_view=True,  # one broadcast a rank instead of one a parameter
        **options,
    )
    logger.info("Applied ZeRO stage 1: optimizer states over %d ranks", mesh.size())
    return sharded


def holder_of_states(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer whose ``state`` this rank holds: ``optimizer``, or this rank's part of a sharded one.

    Options of a part follow those of the whole at each step, so a schedule sets the whole's.
    """
    return _Part(optimizer.optim) if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


class _Part(torch.optim.Optimizer):
    """A rank's part without the groups of which it holds nothing: torch.distributed.checkpoint stumbles on those."""

    def __init__(self, whole: torch.optim.Optimizer):
        self.whole = whole  # nothing is kept here: not what Optimizer.__init__ sets up

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for group in self.whole.param_groups if group["params"]]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.whole.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Of this rank's parameters; the checkpoint takes one with zero gradients to make states appear."""
        self.whole.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.whole.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        found = self.whole.state_dict()
        return found | {"param_groups": [group for group in found["param_groups"] if group["params"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given = iter(state_dict["param_groups"])
        present = self.whole.state_dict()["param_groups"]
        groups = [next(given) if group["params"] else group for group in present]
        self.whole.load_state_dict({"state": state_dict["state"], "param_groups": groups})
