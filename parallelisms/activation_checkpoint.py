"""Activation checkpointing of Transformer blocks: keep less in forward, compute it again in backward."""

import logging

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import SAC_IGNORED_OPS

import titan

logger = logging.getLogger(__name__)


def apply_activation_checkpoint(model: nn.Module, *, mode: str, selective_ac_option: str) -> None:
    """Wrap the blocks under ``model.layers`` in place, or parts of them.

    Args:
        mode: "full": every block is recomputed once. "selective": as ``selective_ac_option`` says. "experts": attention
            is recomputed, and blocks without experts whole; what experts keep is kept, so no token is routed or sent
            again and no product of theirs is computed twice. "nested": the published mistake of checkpointing a block
            that is checkpointed already. Nothing more is kept, and every block is recomputed twice.
        selective_ac_option: "op": keep the outputs of matrix products (every second one, of experts none), of
            attention kernels of a GPU and of collectives, and recompute the rest (torchtitan's SelectiveAC). A number
            n: recompute every n-th block, starting with the first.
    """
    if mode == "selective" and selective_ac_option == "op":
        # FSDP2 marks a unit inside a block (a router) for the profiler, less often in recomputation (torch 2.13).
        profiler = torch.ops.profiler
        SAC_IGNORED_OPS.update(
            {profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction}
        )
        # torchtitan's default would also force the recomputation of a router that a dense model does not have.
        policy = titan.SelectiveAC(titan.SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[]))
        kept = policy.get_save_ops() | attention_operators()
        policy.get_save_ops = lambda: kept  # type: ignore[method-assign]
        policy.apply(model)
        logger.info("Applied selective activation checkpointing by operator")
        return
    every = int(selective_ac_option) if mode == "selective" else 1
    layers = model.get_submodule("layers")
    for i, (name, block) in enumerate(list(layers.named_children())):
        if mode == "experts" and hasattr(block, "moe"):
            block.attention = _checkpointed(block.attention)
        elif i % every == 0:
            once = _checkpointed(block)
            layers.register_module(name, _checkpointed(once) if mode == "nested" else once)
    what = {"experts": "all but experts", "nested": "every block, twice"}.get(mode)
    logger.info(
        "Applied activation checkpointing to %s", what or f"every {'single' if every == 1 else f'{every}th'} block"
    )


def _checkpointed(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module, preserve_rng_state=False, early_stop=False)


def attention_operators() -> set[torch._ops.OpOverload]:
    """Attention that is registered as operators beside torch's own: model/attention_flash.py, and the ring and
    all-gather of context parallelism, whose messages would be sent again.
    """
    registered = torch.ops.ablation_trainer
    names = ("flash2_forward", "flash4_forward", "ring_attention", "allgather_attention")
    return {getattr(registered, name).default for name in names if hasattr(registered, name)}
