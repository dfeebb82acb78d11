"""Context parallelism on two GPUs: NCCL, every fused kernel in bfloat16, whole runs."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F

from config.attention import KERNELS as TRAITS
from model.attention import attention_backend
from model.attention_choice import import_problem
from parallelisms.allgather_attention import allgather_attention
from parallelisms.block_attention import KERNELS
from parallelisms.context_layout import Layout
from parallelisms.ring_attention import ring_attention
from parallelisms.ulysses_attention import heads_for_sequence, sequence_for_heads
from tests.test_train import launch, lines, losses

pytestmark = pytest.mark.multi_gpu
B, S, H, KV, D = 2, 2048, 8, 2, 64
OPERATORS = {"ring": ring_attention, "allgather": allgather_attention}
BOUND = 1.5e-2
"""Relative, in L2, of bfloat16 against float64."""


def usable() -> list[str]:
    """Backends with a block kernel that can be imported here."""
    return [
        name
        for name, traits in TRAITS.items()
        if attention_backend(name).blocks is not None and not (traits.package and import_problem(name))
    ]


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm()).item()


def attend(rank: int, folder: str, names: list[str]) -> None:
    """On one of two GPUs: every kernel, method and layout against float64 on the whole sequence."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = timedelta(seconds=120)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S, h, D) for h in (H, KV, KV, H))
    whole = [torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes]
    q, k, v = (x.double().transpose(1, 2).requires_grad_() for x in whole[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    expected = [out, *(g.transpose(1, 2) for g in torch.autograd.grad(out, (q, k, v), whole[3].double()))]
    for name in names:
        backend = attention_backend(name)
        KERNELS[name] = backend.blocks
        for method in (*OPERATORS, "ulysses"):
            for layout in ("zigzag", "contiguous") if method != "ulysses" else ("contiguous",):
                places = Layout(layout, 2).places(rank, S, device)
                leaves = [x[:, places].contiguous().requires_grad_() for x in whole[:3]]
                if method == "ulysses":
                    heads = heads_for_sequence(*leaves, group)
                    mask = backend.prepare(None, None, torch.zeros(B, S, dtype=torch.int64, device=device))
                    found = sequence_for_heads(backend(*heads, mask), group)
                else:
                    found, _ = OPERATORS[method](*leaves, None, True, layout, name, group.group_name)
                gradients = torch.autograd.grad(found, leaves, whole[3][:, places].contiguous())
                errors = [relative(x, y[:, places]) for x, y in zip([found, *gradients], expected, strict=True)]
                assert max(errors) < BOUND, f"{name}, {method}, {layout}, rank {rank}: {errors}"
    dist.destroy_process_group()


def test_every_kernel_attends_over_two_gpus_as_float64_on_one(tmp_path):
    names = usable()
    assert {"sdpa", "sdpa_flash", "sdpa_cudnn"} <= set(names)
    torch.multiprocessing.spawn(attend, args=(str(tmp_path), names), nprocs=2)


RUN = ["--training.steps", "10", "--training.seq_len", "512", "--training.mixed_precision_param", "bfloat16"]
RUN += ["--training.local_batch_size", "2", "--training.global_batch_size", "8", "--metrics.log_freq", "1"]
OP = ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"]


def trained(folder: Path, *options: str) -> dict[int, float]:
    done = launch(folder, *RUN, *options, ranks=2, environment=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all("loss_metrics/global_avg_loss" in line for line in lines(folder)[1:])
    return losses(folder)


def test_runs_follow_fsdp_eager_compiled_and_checkpointed(tmp_path):
    fsdp = trained(tmp_path / "fsdp")
    for name, options in {
        "ring": [],
        "ring, compiled, by operator": ["--compile.enable", *OP],
        "contiguous": ["--parallelism.context_parallel_layout", "contiguous"],
        "allgather, compiled": ["--parallelism.context_parallel_method", "allgather", "--compile.enable"],
        "ulysses, compiled": ["--parallelism.context_parallel_method", "ulysses", "--compile.enable"],
    }.items():
        found = trained(tmp_path / name, "--parallelism.context_parallel_degree", "2", *options)
        assert found.keys() == fsdp.keys()
        assert max(abs(fsdp[step] - found[step]) for step in fsdp) < 0.05, name
