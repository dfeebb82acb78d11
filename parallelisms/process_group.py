"""Joining and leaving the job that torchrun started."""

import os
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from parallelisms.mesh import Mesh

T = TypeVar("T")


def join(mesh: Mesh, device: torch.device, *, timeout_seconds: int) -> None:
    """Start the process group (NCCL or gloo) and make ``mesh``'s DeviceMesh. A single process needs neither.

    Args:
        timeout_seconds: longest wait for a collective until ``set_timeout``.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    timeout = timedelta(seconds=timeout_seconds)
    if device.type == "cuda":
        # gloo beside NCCL, for objects that are on the CPU.
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    mesh.connect(device.type)


def gather(value: T) -> list[T]:
    """``value`` of every rank, in the order of the ranks; a collective."""
    if not dist.is_initialized():
        return [value]
    everyone = [value] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def set_timeout(mesh: Mesh, seconds: int) -> None:
    """Bound every later collective: a rank that hangs is reported by the others after ``seconds``."""
    if mesh.device_mesh is None:
        return
    for group in (None, *mesh.groups):
        _set_pg_timeout(timedelta(seconds=seconds), group)


def from_first_rank(value: T) -> T:
    """``value`` of rank 0, on every rank."""
    if not dist.is_initialized():
        return value
    shared = [value]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def barrier() -> None:
    """Wait until every rank is here."""
    if dist.is_initialized():
        dist.barrier()


def leave() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
