"""What ranks tell each other in one step: calls and bytes of each kind of communication, by axis of the mesh.

    with Traffic(axes_of(mesh)) as traffic:
        step(batch)
    traffic.summary()   # {"tp": {"all_gather": {"calls": 17, "bytes": 1114112}, ...}, ...}

torch's CommDebugMode counts calls of some collectives by operator. This counts all of them and sends and receives, with
bytes, and knows whose they are. ``python -m tests.fingerprint`` writes the golden file anew.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config.load import load_file
from config.schema import Config
from parallelisms.mesh import Mesh
from tests import ranks

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).with_name("fingerprints.json")
QUESTIONS = {  # question -> ranks -> its arms
    "data_parallel": {4: ["ddp", "zero_1", "zero_2", "zero_3", "fsdp1", "hsdp"]},
    "ddp_vs_fsdp2": {2: ["ddp", "fsdp2"]},
    "tensor_vs_fsdp": {2: ["fsdp", "tp"], 4: ["tp"]},
    "fsdp_vs_tp_vs_pp": {4: ["fsdp", "tp", "pp", "tp+pp"]},
    "pipeline_schedules": {
        2: ["naive", "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"]
    },
}
BASELINES = ["llama3_1b", "llama3_8b", "llama3_70b", "moe_7b_a1b"]
"""Complete configurations that say how they are spread: on two ranks, with their model and batch made small."""
SMALL = {
    "model.n_layers": 2, "model.dim": 64, "model.hidden_dim": 128, "model.n_heads": 4, "model.n_kv_heads": 2,
    "model.head_dim": 16, "model.vocab_size": 512, "moe.num_experts": 8, "moe.top_k": 2, "moe.hidden_dim": 32,
    "data.roots": [], "data.tokenizer": "bytes", "training.seq_len": 64, "training.local_batch_size": 2,
    "training.global_batch_size": 8, "validation.enable": False, "compile.enable": False,
}  # fmt: skip
KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "send": "send",
    "recv_": "receive",
}
"""Operator -> kind. The same collective has an operator in place and a functional one."""


class Traffic(TorchDispatchMode):
    """Counts communication of this rank while it is entered.

    Args:
        axes: name of a process group -> what to call it. Others are "other"; groups of one rank do not count.
    """

    def __init__(self, axes: dict[str, str]):
        super().__init__()
        self.axes = axes
        self.seen: dict[tuple[str, str], list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t is DTensor for t in types):
            return NotImplemented  # let it become collectives on plain tensors first
        space, _, name = func.name().partition("::")
        if space == "ablation_trainer":  # an operator of ours: what is sent inside of it counts
            with self:
                return inside(func)(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        name = name.partition(".")[0]
        if space in ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor") and name in KINDS:
            group = _group(args)
            if group.size() > 1:
                # The side of a collective that holds more: what is gathered, or what is scattered.
                size = max(_bytes(args), _bytes(out)) if name[-1] != "_" else _largest(args)
                entry = self.seen.setdefault((self.axes.get(group.group_name, "other"), KINDS[name]), [0, 0])
                entry[0] += 1
                entry[1] += size
        return out

    def summary(self) -> dict[str, dict[str, dict[str, int]]]:
        """Axis -> kind -> calls and bytes, sorted by name."""
        found: dict[str, dict[str, dict[str, int]]] = {}
        for (axis, kind), (calls, size) in sorted(self.seen.items()):
            found.setdefault(axis, {})[kind] = {"calls": calls, "bytes": size}
        return found


def inside(func: torch._ops.OpOverload) -> Callable[..., Any]:
    """The Python function behind an operator made by ``torch.library.custom_op``. Called under a dispatch mode, it
    shows the operators that it is made of, where the operator itself would be one.
    """
    return OPDEFS[func.name().partition(".")[0]]._init_fn


def _group(args: Any) -> dist.ProcessGroup:
    for x in args:
        if isinstance(x, str):
            try:
                return torch._C._distributed_c10d._resolve_process_group(x)
            except (RuntimeError, ValueError):
                continue  # the name of a reduction
        if isinstance(x, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(x)
            except (RuntimeError, TypeError):
                continue  # the reduction itself
    raise LookupError("communication without a process group")


def _bytes(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(values) if isinstance(t, torch.Tensor))


def _largest(args: Any) -> int:
    return max(_bytes(x) for x in args)


def axes_of(mesh: Mesh) -> dict[str, str]:
    """Name of a process group -> axis of ``mesh``, for :class:`Traffic`."""
    assert mesh.device_mesh is not None
    names = {mesh.device_mesh.get_group(axis).group_name: axis for axis in mesh.device_mesh.mesh_dim_names or ()}
    joined = {"cp": mesh.cp_mesh, "dp": mesh.dp_mesh, "loss": mesh.loss_mesh, "shards": mesh.device_mesh["shards"] if mesh.tp > 1 else None}
    for name, axis in joined.items():
        if axis is not None:
            names.setdefault(axis.get_group().group_name, name)
    return names


def of_step(config: Config) -> dict[str, Any]:
    """Traffic of the third step of ``config`` on this rank: in the first two DDP settles on its buckets."""
    from tests.parallelisms.test_zero import built

    mesh, _, step, batch = built(config)
    step(batch)
    step(batch)
    with Traffic(axes_of(mesh)) as traffic:
        step(batch)
    return traffic.summary()


def of_arm(question: str, arm: str, world_size: int) -> dict[str, Any]:
    """Traffic a step on rank 0 of an arm of train_configs/ablations."""
    path = ROOT / "train_configs" / "ablations" / f"{question}.toml"
    return ranks.run(world_size, of_step, load_file(path, arm=arm).config)[0]


def of_baseline(name: str) -> dict[str, Any]:
    """Traffic a step on rank 0 of two of train_configs/<name>.toml, made ``SMALL``."""
    return ranks.run(2, of_step, load_file(ROOT / "train_configs" / f"{name}.toml", SMALL).config)[0]


def main() -> None:
    """Write the golden file."""
    found = {
        f"{question}/{arm} on {n}": of_arm(question, arm, n)
        for question, arms in QUESTIONS.items()
        for n, names in arms.items()
        for arm in names
    }
    found |= {f"{name}, small, on 2": of_baseline(name) for name in BASELINES}
    version = ".".join(torch.__version__.split(".")[:2])
    GOLDEN.write_text(json.dumps({"torch": version, "steps": found}, indent=1) + "\n")
    print(f"wrote {GOLDEN}")


if __name__ == "__main__":
    sys.exit(main())
