"""Micro-batches of one optimizer step under data parallelism: what is kept and what is sent between them.

A step of m micro-batches under FSDP2 gathers every parameter 2 m times and reduces every gradient m times. Parameters
that a backward pass has gathered serve the next forward pass where they may stay: then they are gathered m + 1 times
(once, if the forward pass keeps them too). They take the place of activations, which that backward pass frees as it
gathers them, so the peak of a step does not grow where a micro-batch's activations are larger than the parameters in
the compute dtype (:func:`config.estimate.keeps_gathered`).
"""

import functools
from collections.abc import Callable

from torch import nn
from torch.distributed.fsdp import FSDPModule

from config.estimate import keeps_gathered
from config.refusal import compares_operators
from config.schema import Config
from parallelisms.mesh import Mesh


def between_micro_batches(mesh: Mesh, config: Config) -> Callable[[nn.Module, bool], None]:
    """(model, last) -> None: to be called before each micro-batch, ``last`` for the last of a step."""
    return functools.partial(
        set_gradient_sync,
        keep_gathered=mesh.sharded and keeps_gathered(config, mesh.world_size),
        keep_experts=not compares_operators(config),
        reduce_last=config.parallelism.fsdp_reduce_gradients == "last",
        accumulate=config.training.mixed_precision_reduce != "bfloat16",
    )


def set_gradient_sync(
    model: nn.Module,
    last: bool,
    *,
    keep_gathered: bool = False,
    keep_experts: bool = True,
    reduce_last: bool = False,
    accumulate: bool = True,
) -> None:
    """Prepare ``model`` for the next micro-batch of a step, the ``last`` of it or not.

    DDP reduces gradients with the last. FSDP2 reduces them with each: holding whole gradients would cost the memory
    that sharding saves. What is small waits for the last: gradients of routers, and what HSDP sums over its copies,
    which is sharded by then.

    Args:
        keep_gathered: FSDP2 keeps parameters that a backward pass has used for the next forward pass.
        keep_experts: those of units of experts too. Not where checkpointing compares operators: such a unit is inside
            the block, so a forward pass that gathers nothing would have fewer operators than its recomputation.
        reduce_last: FSDP2 reduces all gradients with the last micro-batch.
        accumulate: the dtype of reductions is wide enough to sum micro-batches in it.
    """
    if not isinstance(model, FSDPModule):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        return
    model.set_is_last_backward(last)  # else the device waits here for the last reduction
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            router = name.endswith("moe.router")
            waits = reduce_last or (accumulate and router)
            keeps = router or (keep_gathered and (keep_experts or not name.endswith("moe.experts")))
            module.set_reshard_after_backward(last or not keeps, recurse=False)
            module.set_requires_gradient_sync(last or not waits, recurse=False)
            module.set_requires_all_reduce(last or not accumulate, recurse=False)
