"""FSDP2's messages without its copies.

FSDP2 casts the shards of a unit into one buffer, copies that into a message, and copies the gathered message out to
the parameters; gradients are cast into one float32 message, which is reduced. For a unit of P parameters on two ranks,
bfloat16 of float32 shards, that is 9 P bytes of memory traffic for a gather beside the message itself (3 P to cast,
2 P to copy in, 4 P to copy out) and 6 P for a reduction.

Here each parameter is gathered straight into its place, all of a unit in one group call: the cast remains. A gradient
is sent as it is, each rank's rows to that rank, and summed there in float32, in the order of ranks: half the bytes of a
float32 reduction on the wire and the same sum, for additions of two ranks to the bit. What is added to the gradients of
earlier micro-batches is added in the same pass. A unit that one rank holds whole, as experts' under EP over all ranks,
is cast into its place and its gradients added, without a message.

FSDP2 lets a unit have communication of its own (``set_custom_all_gather``, ``set_custom_reduce_scatter``), yet packs
messages before it calls that. So its three functions that pack are replaced here, for units that carry
:class:`DirectAllGather` and :class:`DirectReduceScatter`; all others, and tensors that do not fit, go the old way. The
functions are internal to torch: their parameters are compared with those of the versions this was written for.
"""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor

from parallelisms.sum_of_ranks import sum_of_ranks

logger = logging.getLogger(__name__)

MOST_RANKS = 16
"""Larger groups reduce by a ring: there a rank would send each other one a message a parameter."""
PARAMETERS = {
    "foreach_all_gather": "fsdp_params group async_op all_gather_copy_in_stream all_gather_stream device"
    " all_gather_comm",
    "foreach_all_gather_copy_out": "all_gather_result fsdp_params group",
    "foreach_reduce": "fsdp_params unsharded_grads reduce_scatter_group reduce_scatter_stream reduce_scatter_comm"
    " orig_dtype reduce_dtype device gradient_divide_factor all_reduce_group all_reduce_stream all_reduce_grads"
    " partial_reduce_output all_reduce_hook force_sum_reduction_for_comms",
}
"""Of the functions that are replaced, in torch 2.11 and 2.13."""


class DirectAllGather(collectives.DefaultAllGather):
    """Marks a unit whose parameters are gathered into their places."""


class DirectReduceScatter(collectives.DefaultReduceScatter):
    """Marks a unit whose gradients are sent from their places."""


class DirectResult(collectives.AllGatherResult):
    """A gather into parameters. ``all_gather_output`` keeps its input alive as long as FSDP2 keeps an output."""


def apply_direct_collectives(model: nn.Module) -> None:
    """Let all FSDP2 units of ``model`` gather and reduce without packing.

    Units should be gathered ahead explicitly (parallelisms/data_parallel.py): as parameters are allocated when a
    gather begins, it waits for all that was launched before, and one that begins when its unit is due hides nothing.

    Raises:
        RuntimeError: FSDP2 of this torch is another than the one this was written for.
    """
    _replace()
    gather, reduce = DirectAllGather(), DirectReduceScatter()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(reduce)
    logger.info("Applied direct collectives; what does not fit them is packed (docs/parallelisms.md)")


def _replace() -> None:
    """Put the functions here in the place of FSDP2's, once."""
    for name, replacement in (
        ("foreach_all_gather", _gather),
        ("foreach_all_gather_copy_out", _arrive),
        ("foreach_reduce", _reduce),
    ):
        packed = getattr(collectives, name)
        if list(inspect.signature(packed).parameters) != PARAMETERS[name].split():
            raise RuntimeError(
                f'parallelism.fsdp_collectives = "direct" knows {name} of torch 2.11 and 2.13, not of'
                f' {torch.__version__}. Set it to "packed".'
            )
        setattr(param_group, name, functools.partial(replacement, packed))


@torch.no_grad()
def _gather(
    packed: Callable[..., Any],
    fsdp_params: list[FSDPParam],
    group: dist.ProcessGroup,
    async_op: bool,
    copy_in_stream: Any,
    gather_stream: Any,
    device: torch.device,
    comm: Any,
) -> Any:
    """Begin to gather a unit."""
    if async_op or not isinstance(comm, DirectAllGather) or not all(map(_gathers_whole, fsdp_params)):
        return packed(fsdp_params, group, async_op, copy_in_stream, gather_stream, device, comm)
    handle = _get_device_handle(device.type)
    for p in fsdp_params:
        numel, dtype = p._sharded_param_data.numel(), p.param_dtype or p.orig_dtype
        p.init_all_gather_outputs([numel], [dtype], group.size(), device)
        p.alloc_all_gather_outputs()
    outputs = [p.all_gather_outputs[0] for p in fsdp_params]
    gather_stream.wait_stream(handle.current_stream())  # what is launched there may still use this memory
    counted = tuple(x for x in outputs if not x.is_inference())
    if group.size() == 1:
        inputs = [p._sharded_param_data for p in fsdp_params]
    else:
        with handle.stream(copy_in_stream):
            inputs = [tensors[0] for tensors in collectives._get_param_all_gather_inputs(fsdp_params)]
        gather_stream.wait_stream(copy_in_stream)
    with handle.stream(gather_stream), torch.autograd._unsafe_preserve_version_counter(counted):
        if group.size() == 1:
            torch._foreach_copy_(outputs, inputs)
        else:
            group.allgather_into_tensor_coalesced(outputs, inputs).wait()
        return DirectResult(inputs[0], gather_stream.record_event(), None, [], [], [])


def _arrive(
    packed: Callable[..., None], all_gather_result: Any, fsdp_params: list[FSDPParam], group: dist.ProcessGroup
) -> None:
    """Wait until a unit is there."""
    if not isinstance(all_gather_result, DirectResult):
        packed(all_gather_result, fsdp_params, group)
        return
    if all_gather_result.all_gather_event is not None:
        handle = _get_device_handle(fsdp_params[0].device.type)
        handle.current_stream().wait_event(all_gather_result.all_gather_event)


def _gathers_whole(p: FSDPParam) -> bool:
    """Whether shards, one after the other, are the parameter."""
    extension = hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather")
    return not (p.offload_to_cpu or extension or p.fsdp_placement.dim) and p.sharded_state == ShardedState.SHARDED


@torch.no_grad()
def _reduce(
    packed: Callable[..., Any],
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
    group: dist.ProcessGroup,
    stream: Any,
    comm: Any,
    orig_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    device: torch.device,
    factor: float | None,
    all_reduce_group: dist.ProcessGroup | None,
    all_reduce_stream: Any,
    all_reduce_grads: bool,
    partial_reduce_output: torch.Tensor | None,
    all_reduce_hook: Callable[[torch.Tensor], None] | None,
    force_sum_reduction_for_comms: bool = False,
) -> Any:
    """Sum a unit's gradients over ranks and add them to its shards."""
    if not (
        isinstance(comm, DirectReduceScatter)
        and group.size() <= MOST_RANKS
        and all_reduce_group is None
        and all_reduce_hook is None
        and factor == 1.0
        and (reduce_dtype or unsharded_grads[0].dtype) == orig_dtype
        and len({g.dtype for g in unsharded_grads}) == 1  # else FSDP2 says what is wrong
        and all(_sends_rows(p, g, group.size()) for p, g in zip(fsdp_params, unsharded_grads, strict=True))
    ):
        return packed(
            fsdp_params, unsharded_grads, group, stream, comm, orig_dtype, reduce_dtype, device, factor,
            all_reduce_group, all_reduce_stream, all_reduce_grads, partial_reduce_output, all_reduce_hook,
            force_sum_reduction_for_comms,
        )  # fmt: skip
    handle = _get_device_handle(device.type)
    world, rank, gradients = group.size(), group.rank(), list(unsharded_grads)
    unsharded_grads.clear()
    sizes = [g.numel() // world for g in gradients]
    stream.wait_stream(handle.current_stream())
    with handle.stream(stream):
        received = torch.empty((world - 1, sum(sizes)), dtype=gradients[0].dtype, device=device)
        others = [peer for peer in range(world) if peer != rank]
        arriving = list(received.split(sizes, dim=1))
        messages = []
        for gradient, pieces in zip(gradients, arriving, strict=True):
            rows = gradient.view(world, -1)
            for piece, peer in zip(pieces, others, strict=True):
                messages.append(dist.P2POp(dist.isend, rows[peer], group=group, group_peer=peer))
                messages.append(dist.P2POp(dist.irecv, piece, group=group, group_peer=peer))
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        new = [i for i, p in enumerate(fsdp_params) if p.sharded_param.grad is None]
        flat = iter(
            torch.empty(sum(sizes[i] for i in new), dtype=orig_dtype, device=device).split([sizes[i] for i in new])
        )
        for p, gradient, pieces in zip(fsdp_params, gradients, arriving, strict=True):
            kept = p.sharded_param.grad
            target = next(flat) if kept is None else kept.to_local().view(-1)
            sum_of_ranks(gradient.view(world, -1)[rank], pieces, rank, target, add=kept is not None)
            if kept is None:
                p.sharded_param.grad = p.to_sharded_dtensor(target.view(p.sharded_size))
        event = stream.record_event()
    # Whoever launches next waits for the event before it lets go of the gradients, as it does of a packed message.
    streams = (stream,) if RETURNS_STREAM else ()
    return (gradients, event, *streams, event, None, None, None)


RETURNS_STREAM = len(get_args(collectives.foreach_reduce.__annotations__["return"])) == 7
"""torch 2.13 asks which stream the last event is of."""


def _sends_rows(p: FSDPParam, gradient: torch.Tensor, ranks: int) -> bool:
    """Whether equal parts of the gradient's memory, one after the other, are what ranks are to have."""
    kept = p.sharded_param.grad
    return (
        p.fsdp_placement.dim == 0
        and not p.offload_to_cpu
        and not getattr(p.sharded_param, "_post_accumulate_grad_hooks", None)
        and gradient.is_contiguous()
        and gradient.shape[0] % ranks == 0
        and (kept is None or (isinstance(kept, DTensor) and kept.to_local().is_contiguous()))
    )
