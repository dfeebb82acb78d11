"""Run a function on N gloo ranks, in processes that start once a test session.

    results = ranks.run(2, function, *arguments)      # one result a rank

``function`` must be importable by name (top level of a module) and runs inside an initialised process group of N
ranks, with the environment torchrun would set. N = 1 has no process group, as a plain ``python train.py``.
"""

import atexit
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT_SECONDS = 240
MANY_THREADS = 250
"""Of a rank process. Compiled code and operators' caches keep process groups, and each keeps a dozen threads that wake;
processes with more are replaced.
"""

_workers: list[tuple[Any, Connection]] = []


def run(n: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
    """Call ``function(*arguments)`` on ranks 0 .. n - 1 and return their results in order.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message) or the ranks hang; all processes are then
            replaced.
    """
    while len(_workers) < n:
        _workers.append(_start())
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(n):
            _workers[rank][1].send((rank, n, os.path.join(folder, "store"), function, arguments))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < n:
            waiting = {_workers[r][1]: r for r in range(n) if r not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                shut_down()
                raise RuntimeError(f"ranks {sorted(waiting.values())} of {n} gave no answer in {timeout:.0f} s")
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                try:
                    failed, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    failed, value = True, "the process died"
                if failed:  # the others may wait for this rank for ever
                    shut_down()
                    raise RuntimeError(f"rank {rank} of {n} failed:\n{value}")
                results[rank] = value
    if any(_threads(process.pid) > MANY_THREADS for process, _ in _workers):
        shut_down()
    return [results[r] for r in range(n)]


def shut_down() -> None:
    """End all rank processes; the next ``run`` starts new ones."""
    for process, connection in _workers:
        connection.close()
        process.kill()
        process.join()
    _workers.clear()


atexit.register(shut_down)


def _threads(pid: int) -> int:
    """Threads of a process; 0 where there is no /proc."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _start() -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, n, store, function, arguments = connection.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
        try:
            if n > 1:
                limit = timedelta(seconds=TIMEOUT_SECONDS)
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n, timeout=limit)
            answer = (False, function(*arguments))
        except BaseException:
            answer = (True, traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                _forget_meshes()
                gc.collect()  # groups lie in cycles
        connection.send(answer)


def _forget_meshes() -> None:
    """Empty DTensor's caches. They compare meshes by shape: the next mesh of a shape would be given the groups of the
    last, which are gone, where a longer run of one process never meets a second mesh.
    """
    from torch.distributed.tensor import _redistribute, debug

    for clear in (
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
    ):
        if clear is not None:  # private, and not in every release
            clear()
