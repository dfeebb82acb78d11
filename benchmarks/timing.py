"""How benchmarks time a call and weigh its memory, and what a machine can do at best.

On CUDA a time lies between two events of the device. Calls are queued behind a wait, so that a call of many small
kernels is as long as its kernels, not as the host's queueing of them; that has a benchmark of its own (host.py). On a
CPU, for tests, it is the clock.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

CACHE_BYTES = 2**28
"""More than any cache of a GPU holds: what was written before it is not in the cache."""
CYCLES_PER_SECOND = 2e9
"""Of a device's wait; near enough, a wait only has to be long."""
LONGEST_WAIT_S = 0.25
COPY_BYTES, PRODUCT_SIZE = 2**32, 8192
"""Of the copy and the square bfloat16 product that are the ceilings of a GPU."""


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_ms(
    calls: Call | Sequence[Call],
    repeats: int,
    *,
    device: torch.device | None = None,
    cache: torch.Tensor | None = None,
    wait_s: float = 0.0,
) -> list[float]:
    """Milliseconds of each of ``repeats`` calls.

    Args:
        calls: one, or several that are taken in turn, each with inputs of its own.
        device: None: the current GPU.
        cache: CACHE_BYTES that are written before each call.
        wait_s: time the device is kept busy first, in which the host queues ahead.
    """
    turns = list(calls) if isinstance(calls, Sequence) else [calls]
    if device is not None and device.type != "cuda":
        return [_clock_ms(turns[number % len(turns)]) for number in range(repeats)]
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    if wait_s:
        torch.cuda._sleep(int(min(wait_s, LONGEST_WAIT_S) * CYCLES_PER_SECOND))
    for number, (begin, end) in enumerate(events):
        if cache is not None:
            cache.zero_()
        begin.record()
        turns[number % len(turns)]()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def _clock_ms(call: Call) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def median_ms(calls: Sequence[Call], repeats: int, device: torch.device, warm_up: int = 3) -> float:
    """Median of ``repeats`` calls, after ``warm_up`` calls on each set of inputs, queued ahead."""
    for _ in range(warm_up):
        for call in calls:
            call()
    synchronize(device)
    started = time.perf_counter()
    for call in calls:
        call()
    host_s = (time.perf_counter() - started) / len(calls)  # at most what queueing one takes
    synchronize(device)
    return statistics.median(time_ms(calls, repeats, device=device, wait_s=1.5 * host_s * repeats))


def peak_gib(call: Call) -> float:
    """What a call allocates on the GPU at its peak, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def ceilings(
    device: torch.device, *, copy_bytes: int = COPY_BYTES, product_size: int = PRODUCT_SIZE, repeats: int = 20
) -> dict[str, float]:
    """What this device does at best: ``bytes_per_s``, read and written, of one large copy, and ``flops_per_s`` of one
    large bfloat16 product.
    """
    source = torch.ones(copy_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy_ms = median_ms([functools.partial(target.copy_, source)], repeats, device)
    del source, target
    generator = torch.Generator(device).manual_seed(0)  # zeros would need less power, and so give a higher clock
    a, b = (torch.randn(product_size, product_size, device=device, generator=generator).bfloat16() for _ in range(2))
    product_ms = median_ms([functools.partial(torch.matmul, a, b)], repeats, device)
    return {"bytes_per_s": 2e3 * copy_bytes / copy_ms, "flops_per_s": 2e3 * product_size**3 / product_ms}
