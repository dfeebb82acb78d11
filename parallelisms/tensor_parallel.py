"""Tensor and sequence parallelism: matrices are cut over the ranks of a group, and between them the sequence is.

A block gathers the sequence before attention and before the feed-forward layer, computes its share of heads and of
hidden features, and scatters the sum back over the sequence (Korthikanti et al., arXiv 2205.05198). Norms, residuals
and what is kept for the backward pass exist once in the group, and the traffic equals that of the all-reduces they
replace. docs/parallelisms.md says why it is one-dimensional.
"""

import functools
import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parallelisms.mesh import on_this_rank
from parallelisms.vocabulary_loss import GatheredVocabulary, SharedVocabulary

logger = logging.getLogger(__name__)


def apply_tensor_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    loss_parallel: bool,
    asynchronous: bool = False,
    experts: bool = True,
) -> None:
    """Cut ``model`` in place over the one-dimensional ``mesh``.

    Args:
        model: ``tok_embeddings``, ``layers``, ``norm``, ``output``, of which a pipeline stage may lack some; parameters
            may be on the meta device. Numbers of heads, widths, vocabulary and sequence length divide by the mesh
            (config/parallel_rules.py).
        mesh: neighbours; every rank of it is given the same tokens.
        loss_parallel: the model returns this rank's columns of the logits (parallelisms/vocabulary_loss.py), else all.
        asynchronous: the compiler overlaps gathers and scatters with the products next to them. CUDA only.
        experts: cut routed experts as well. Expert parallelism places them itself.
    """
    outer: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": _Head(loss_parallel),
    }
    _parallelize(model, mesh, outer)
    if getattr(model, "tok_embeddings", None) is not None:
        model.tok_embeddings.register_forward_hook(lambda _, inputs, output: _Wait.apply(output))
    model.tie_weights()  # cutting embedding and head the same way, by rows of the vocabulary, made two of one parameter
    for block in model.get_submodule("layers").children():
        # Heads are cut and their norm's weight is not: (B, S, H, D) with a norm a head, (B, S, H * D) with one for all.
        whole = block.attention.norm_whole
        norm = _FeaturesGathered() if whole else SequenceParallel(sequence_dim=2, use_local_output=True)
        _parallelize(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": _gathered_input(3),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.q_norm": norm,
                "attention.k_norm": norm,
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": _gathered_input(1),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "moe": _SequenceGathered(),
                "moe.router.gate": _Replicated(),
                **({"moe.experts": _NarrowExperts()} if experts else {}),
                "moe.shared_experts.w1": ColwiseParallel(),
                "moe.shared_experts.w3": ColwiseParallel(),
                "moe.shared_experts.w2": RowwiseParallel(),
            },
        )
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and hasattr(module, "compute"):  # a kernel that knows no DTensor
            module.compute = functools.partial(_norm_of_shards, module.compute)
    if asynchronous:
        _overlap(mesh)
    logger.info(
        "Applied %stensor and sequence parallelism over %d ranks%s",
        "asynchronous " if asynchronous else "",
        mesh.size(),
        ", loss parallel" if loss_parallel else "",
    )


def _parallelize(module: nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    present = {name for name, child in module.named_modules() if child is not None}
    parallelize_module(module, mesh, {name: style for name, style in plan.items() if name in present})


def _gathered_input(arguments: int) -> PrepareModuleInput:
    """The first of ``arguments`` positional inputs comes cut over the sequence and is gathered."""
    others = (None,) * (arguments - 1)
    return PrepareModuleInput(input_layouts=(Shard(1), *others), desired_input_layouts=(Replicate(), *others))


class _Replicated(ParallelStyle):
    """Every rank holds the parameters and computes the same: input and output are plain, whole tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        return distribute_module(module, device_mesh, None, whole, lambda _, output, mesh: output.to_local())


class _Head(ParallelStyle):
    """Each rank holds some rows of the matrix, the same part of the vocabulary, and sees all tokens.

    Args:
        loss_parallel: the loss combines what it finds in each rank's logits (parallelisms/vocabulary_loss.py), else
            logits are gathered before it.
    """

    def __init__(self, loss_parallel: bool):
        super().__init__()
        self.loss_parallel = loss_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        cut = distribute_tensor(module.weight.data, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(cut))

        def gather(_: nn.Module, inputs: Any) -> Any:
            x = inputs[0]
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [Shard(1)], run_check=False)
            # What a rank adds to the gradient of hidden states is of its own columns alone.
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        module.register_forward_pre_hook(gather)
        module.matrix = lambda: module.weight.to_local()
        kind = SharedVocabulary if self.loss_parallel else GatheredVocabulary
        module.loss.vocabulary = kind(device_mesh)
        return module


class _FeaturesGathered(ParallelStyle):
    """A norm over features that are cut: they are gathered before it and cut again after it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(
                DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False).redistribute(placements=[Replicate()])
                for x in inputs
            )

        def cut(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(placements=[Shard(output.ndim - 1)]).to_local()

        return distribute_module(module, device_mesh, None, gather, cut)


class _SequenceGathered(ParallelStyle):
    """A layer that needs whole sequences, as a router with capacity or a sequence-wise loss does: (x, ...) -> (x, ...).

    The sequence is gathered before it and its output cut again. What is between runs on every rank alike, so gradients
    are whole there: neither step sums.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: Any) -> Any:
            x, *others = inputs
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [Shard(1)], run_check=False)
            return x.redistribute(placements=[Replicate()]).to_local(), *others

        def cut(_: nn.Module, inputs: Any, output: Any) -> Any:
            x, *others = output
            x = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
            return x.redistribute(placements=[Shard(1)]).to_local(), *others

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(cut)
        return module


def _norm_of_shards(compute: Any, x: DTensor, weight: DTensor, eps: float) -> DTensor:
    """``compute`` of the rows on this rank; what they add to the weight's gradient is of these rows alone."""
    cut = any(placement.is_shard() for placement in x.placements)
    mine = weight.to_local(grad_placements=[Partial() if cut else Replicate()])
    return DTensor.from_local(compute(x.to_local(), mine, eps), x.device_mesh, x.placements, run_check=False)


class _NarrowExperts(ParallelStyle):
    """Each rank holds every expert, cut along its hidden features, and sees all tokens."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter.data, device_mesh, [Shard(2)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut))
        module.compute = functools.partial(narrow_experts, module.compute, device_mesh.get_group())
        return module


def narrow_experts(
    compute: Any,
    group: dist.ProcessGroup,
    x: torch.Tensor,
    experts: Any,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """``compute`` (:data:`model.experts.Compute`) with this rank's hidden features of each expert, summed over the
    ranks of ``group``, which are given the same tokens.
    """
    x, weights = _SumGradient.apply(x, group), _SumGradient.apply(weights, group)
    out = compute(x, experts, weights, on_this_rank(w13), on_this_rank(w2), *rest)
    return _Sum.apply(out, group)


class _Wait(torch.autograd.Function):
    """Identity that waits for communication. A compiled block whose input is still on its way gives it no gradient
    (torch 2.13, AOTAutograd with an AsyncCollectiveTensor): embeddings would stay as they were drawn.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.wait() if isinstance(x, collectives.AsyncCollectiveTensor) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _SumGradient(torch.autograd.Function):
    """Identity; gradients are summed over the group, whose ranks use the input for different features."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return collectives.wait_tensor(collectives.all_reduce(grad.contiguous(), "sum", ctx.group)), None


class _Sum(torch.autograd.Function):
    """Sum over the group; what follows is the same on every rank, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _overlap(mesh: DeviceMesh) -> None:
    """Let the compiler split gathers and scatters around matrix products (pytorch "micro-pipeline TP")."""
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
