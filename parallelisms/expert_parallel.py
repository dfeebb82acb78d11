"""Expert parallelism: ranks hold different experts, and tokens travel to them.

Attention and experts see the same ranks differently (parallel folding, arXiv 2504.14960): the ranks along dp_shard, cp
and tp, which share or cut everything else, are efsdp x ep x etp to the experts. ep neighbours hold different experts;
the efsdp ranks that hold the same ones shard them by FSDP.
"""

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from parallelisms.dispatch_all_to_all import AllToAll
from parallelisms.dispatch_token_once import TokenOnce
from parallelisms.tensor_parallel import narrow_experts

logger = logging.getLogger(__name__)

DISPATCHERS = {"all_to_all": AllToAll, "all_to_all_dedup": TokenOnce}


def apply_expert_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    group: dist.ProcessGroup,
    dispatcher: str,
    comm_overlap: str,
    comm_overlap_degree: int,
    tensor_mesh: DeviceMesh | None,
) -> None:
    """Keep a share of each layer's experts in place and send tokens to them. Dense blocks stay as they are.

    Args:
        model: with ``layers``; parameters may be on the meta device, stacked experts are ``moe.experts.w13`` and ``w2``
            [E, ...]. E divides by the ranks of "ep".
        mesh: axes "ep" and "etp". Rank r along ep holds the r-th share of the ids. With etp above 1, which is then tp,
            each expert's hidden features are cut over it, and tokens travel between ranks of equal place in tp.
        group: the ranks along "ep", for tokens alone.
        dispatcher: "all_to_all" or "all_to_all_dedup".
        comm_overlap: "none"; "shared_expert": these are computed while tokens travel to the others; "experts": so are
            they, and a rank computes its experts in parts, each while tokens of others travel ("all_to_all" only).
        comm_overlap_degree: parts, of at least one expert each.
        tensor_mesh: ranks that are given the same tokens, or None.
    """
    narrow, parts = mesh.size(1) > 1, 1
    for block in model.get_submodule("layers").children():
        if not hasattr(block, "moe"):
            continue
        experts = block.moe.experts
        num_experts = experts.w13.shape[0]
        if comm_overlap == "experts":
            parts = min(comm_overlap_degree, num_experts // group.size())
        exchange: Any = DISPATCHERS[dispatcher](group, num_experts, overlap=comm_overlap != "none", parts=parts)
        block.moe.dispatcher = exchange
        if tensor_mesh is not None and not narrow:
            block.moe.dispatcher = TokenShare(exchange, tensor_mesh.get_group())
        for name, parameter in list(experts.named_parameters(recurse=False)):
            axes, placements = (mesh, [Shard(0), Shard(2)]) if narrow else (mesh["ep"], [Shard(0)])
            cut = distribute_tensor(parameter.data, axes, placements, src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(cut))
        if narrow:
            experts.compute = functools.partial(narrow_experts, experts.compute, mesh.get_group("etp"))
    logger.info(
        "Applied expert parallelism over %d ranks%s, dispatcher %s%s",
        mesh.size(0),
        f", each expert over {mesh.size(1)}" if narrow else "",
        dispatcher,
        "" if comm_overlap == "none" else f", overlapped with {comm_overlap}" + f" in {parts} parts" * (parts > 1),
    )


class TokenShare:
    """A dispatcher for ranks that were given the same tokens: each sends an equal share of them, and they put the
    results together. Router and shared experts go on seeing whole sequences.

    Args:
        dispatcher: of the shares.
        group: the ranks with the same tokens.
    """

    def __init__(self, dispatcher: AllToAll, group: dist.ProcessGroup):
        self.dispatcher, self.group = dispatcher, group

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, max_rows: int | None, run: Any, beside: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As :class:`model.moe.Dispatcher` says; T divides by the group."""
        mine = experts.chunk(self.group.size())[self.group.rank()]
        x, weights = _Cut.apply(x, self.group), _Cut.apply(weights, self.group)
        out, other = self.dispatcher(x, mine, weights, None, run, beside)
        return _Whole.apply(out, self.group), other


class _Cut(torch.autograd.Function):
    """This rank's share of rows that all ranks of a group hold. Gradients are gathered, and so are whole on each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grad, ctx.group), None


class _Whole(torch.autograd.Function):
    """The shares of all ranks together. What follows is the same on each, and so is its gradient: cut it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    operators = torch.ops._c10d_functional  # the function around it has another name in each release
    return operators.wait_tensor(operators.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name))
