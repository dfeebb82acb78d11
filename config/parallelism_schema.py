"""Keys of [parallelism]: how a model is spread over ranks. Conventions as in config/schema.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.field import key


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = key(1, minimum=1, parent="parallelism.zero_stage", parent_values=(None,))
    """Ranks that hold whole copies. Alone: DDP. With a shard degree above 1: HSDP."""
    data_parallel_shard_degree: int = key(-1, minimum=-1, parent="parallelism.zero_stage", parent_values=(None,))
    """Ranks that shard parameters (FSDP2). -1: the ranks that are left over. 1: none."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """Data-parallel degrees by ZeRO stage: 0 DDP, 1 DDP with sharded states, 2 FSDP2 kept after forward, 3 FSDP2."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = key(
        "default", parent="parallelism.zero_stage", parent_values=(None,)
    )
    """Free unsharded parameters after forward. default: always; never under zero_stage = 2 and in a pipeline."""
    fsdp_reshard_after_backward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters between the micro-batches of a step. default: only where keeping them takes memory."""
    fsdp_reduce_gradients: Literal["each", "last"] = "each"
    """Micro-batches after which FSDP2 reduces gradients. last: once a step; whole gradients are kept until then."""
    fsdp_collectives: Literal["packed", "direct"] = "packed"
    """How FSDP2 sends a unit: packed into one buffer and copied out, or each parameter from and to its own place."""
    fsdp_prefetch_blocks: int | None = key(None, minimum=1)
    """Blocks that FSDP2 gathers ahead, both ways. Unset: its own order; 1 with experts or direct collectives."""
    fsdp_version: Literal[2, 1] = key(2, parent="parallelism.zero_stage", parent_values=(None, 3))
    """1: torch's older FullyShardedDataParallel, to compare with; data parallelism alone."""
    tensor_parallel_degree: int = key(1, minimum=1)
    """Ranks that share each matrix, and the sequence between matrices (tensor and sequence parallelism)."""
    disable_loss_parallel: bool = False
    """Gather the logits of a tensor-parallel model before the loss, instead of leaving the vocabulary split."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with the products next to it. Needs CUDA and compile.enable."""
    expert_parallel_degree: int = key(1, minimum=1)
    """Ranks that hold different experts, neighbours among those of dp_shard, cp and tp; tokens travel to them."""
    expert_tensor_parallel_degree: int = key(1, minimum=1)
    """Ranks that share each expert's matrices under expert parallelism: 1, or the tensor-parallel degree."""
    context_parallel_degree: int = key(1, minimum=1)
    """Ranks that share each sequence. Parameters are sharded over them too, as over data_parallel_shard_degree."""
    context_parallel_method: Literal["ring", "allgather", "ulysses"] = "ring"
    """How queries meet the keys of other ranks: keys go round, are gathered, or heads are exchanged for sequence."""
    context_parallel_layout: Literal["zigzag", "contiguous"] = key(
        "zigzag", parent="parallelism.context_parallel_method", parent_values=("ring", "allgather")
    )
    """What a rank holds: an early and a late piece, for equal causal work, or one piece. Ulysses: always one piece."""
    pipeline_parallel_degree: int = key(1, minimum=1)
    """Ranks that hold different layers: a pipeline of stages. 1: none."""
    pipeline_parallel_schedule: Literal[
        "naive", "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    """Order of the stages' forward and backward passes. naive: a split alone, whole local batches one by one."""
    pipeline_parallel_microbatch_size: int = key(1, minimum=1)
    """Sequences of a pipeline's micro-batch; divides training.local_batch_size. A naive split does not read it."""
    pipeline_parallel_layers_per_stage: int | None = key(None, minimum=1)
    """Layers a stage. Unset: one stage a rank, two with schedules that interleave or form a V."""
    pipeline_parallel_first_stage_less_layers: int = key(1, minimum=0)
    """Layers the first stage holds less than the others, for its embedding."""
    pipeline_parallel_last_stage_less_layers: int = key(1, minimum=0)
    """Layers the last stage holds less than the others, for its head."""
    module_fqns_per_model_part: list[list[str]] = key(factory=list)
    """Modules of each stage: [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]. Empty: by the rules."""
