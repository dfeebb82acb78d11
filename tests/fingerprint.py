"""What ranks tell each other in one step: calls and bytes of each kind of communication, by axis of the mesh.

    with Traffic(axes_of(mesh)) as traffic:
        step(batch)
    traffic.summary()   # {"tp": {"all_gather": {"calls": 17, "bytes": 1114112}, ...}, ...}

torch's CommDebugMode counts calls of some collectives by operator. This counts all of them and sends and receives, with
bytes, and knows whose they are. ``python -m tests.fingerprint`` writes the golden file anew, with ``--new`` only what
it lacks.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ablation.guard import guard
from ablation.question import read
from config.arithmetic import parameter_counts
from config.flavors import resolve_shape
from config.load import load_file
from config.schema import Config
from parallelisms.mesh import EXPERT_AXES, Mesh
from tests import ranks

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).with_name("fingerprints.json")
BESIDE = {("tensor_vs_fsdp", "tp"): 4, ("fsdp_vs_ep", "ep"): 4} | {
    ("context_parallel_method", method): 4 for method in ("ring", "allgather", "ulysses")
}
"""(question, arm) -> a number of ranks that is not the question's smallest."""
SENDING = ("moe.dispatcher", "moe.comm_overlap")
"""Variables outside of [parallelism] that decide what is sent, or when."""
LARGEST = 20_000_000
"""Parameters of a model that these processes can hold; a larger one is made ``SMALL``: the same layout on less."""
SMALL = {
    "model.n_layers": 2, "model.dim": 64, "model.hidden_dim": 128, "model.n_heads": 4, "model.n_kv_heads": 2,
    "model.head_dim": 16, "model.vocab_size": 512, "moe.num_experts": 8, "moe.top_k": 2, "moe.hidden_dim": 32,
    "data.roots": [], "data.tokenizer": "bytes", "training.seq_len": 64, "training.local_batch_size": 2,
    "training.global_batch_size": 8, "validation.enable": False, "compile.enable": False, "attention.backend": "auto",
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
    joined = {
        "cp": mesh.cp_mesh,
        "dp": mesh.dp_mesh,
        "loss": mesh.loss_mesh,
        "shards": mesh.device_mesh["shards"] if mesh.tp > 1 else None,
    }
    for name, axis in joined.items():
        if axis is not None:
            names.setdefault(axis.get_group().group_name, name)
    if mesh.exchange_group is not None:
        names[mesh.exchange_group.group_name] = "ep"
    if mesh.expert_mesh is not None:
        for name in (*EXPERT_AXES[2:], "expert_shards"):
            names.setdefault(mesh.expert_mesh[name].get_group().group_name, name)
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


def arms() -> list[tuple[str, str, int]]:
    """(question, arm, ranks) of all arms of the questions about how a model is spread, on the fewest ranks of each."""
    found = []
    for path in sorted((ROOT / "train_configs" / "ablations").glob("*.toml")):
        asked = guard(read(path))
        if any(variable.startswith("parallelism.") or variable in SENDING for variable in asked.question.variables):
            fewest = min(asked.question.table.runs_on["gpus"])
            found += [(path.stem, arm, fewest) for arm in asked.arms]
    return found + [(*arm, n) for arm, n in BESIDE.items()]


def baselines() -> list[str]:
    """The complete configurations that say how they are spread."""
    return sorted(p.stem for p in (ROOT / "train_configs").glob("*.toml") if "[parallelism]" in p.read_text())


def of_arm(question: str, arm: str, world_size: int) -> dict[str, Any]:
    """Traffic a step on rank 0 of an arm of train_configs/ablations."""
    return ranks.run(world_size, of_step, _loaded(f"ablations/{question}", arm))[0]


def of_baseline(name: str) -> dict[str, Any]:
    """Traffic a step on rank 0 of two of train_configs/<name>.toml."""
    return ranks.run(2, of_step, _loaded(name, None))[0]


def _loaded(name: str, arm: str | None) -> Config:
    path = ROOT / "train_configs" / f"{name}.toml"
    config = load_file(path, arm=arm).config
    large = parameter_counts(resolve_shape(config.model, config.moe)).total > LARGEST
    return load_file(path, SMALL, arm).config if large else config


def main() -> None:
    """Write the golden file. With --new: keep the figures there are, and add those of new configurations."""
    version = ".".join(torch.__version__.split(".")[:2])
    golden = json.loads(GOLDEN.read_text())
    kept = golden["steps"] if "--new" in sys.argv and golden["torch"] == version else {}
    wanted = {f"{question}/{arm} on {n}": partial(of_arm, question, arm, n) for question, arm, n in arms()}
    wanted |= {f"{name} on 2": partial(of_baseline, name) for name in baselines()}
    found = {name: kept[name] if name in kept else count() for name, count in wanted.items()}
    GOLDEN.write_text(json.dumps({"torch": version, "steps": found}, indent=1) + "\n")
    print(f"wrote {GOLDEN}")


if __name__ == "__main__":
    main()
