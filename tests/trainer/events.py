"""Events of a Chrome trace as torch.profiler writes them, made by hand. Times in microseconds."""

import itertools
from typing import Any

Event = dict[str, Any]
MAIN, AUTOGRAD, GLOO = 1, 2, 3
_numbers = itertools.count()


def event(cat: str, name: str, begin: float, end: float, tid: Any = MAIN, **arguments: Any) -> Event:
    """A complete event."""
    place = {"cat": cat, "name": name, "pid": 1, "tid": tid}
    return {"ph": "X", **place, "ts": begin, "dur": end - begin, "args": arguments}


def part(name: str, begin: float, end: float) -> Event:
    """A range of the trainer's on the main thread."""
    return event("user_annotation", f"train/{name}", begin, end)


def kernel(
    name: str, begin: float, end: float, launched: float, *, stream: int = 7, cat: str = "kernel"
) -> list[Event]:
    """Device work and its launch, which another thread may have made."""
    number = next(_numbers)
    return [
        event(cat, name, begin, end, tid=stream, device=0, stream=stream, correlation=number),
        event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, tid=AUTOGRAD, correlation=number),
    ]


def op(name: str, begin: float, end: float, tid: int = MAIN) -> Event:
    """An operator on a thread of the host."""
    return event("cpu_op", name, begin, end, tid)


def gloo(name: str, begin: float, end: float) -> Event:
    """A collective on a thread of gloo's."""
    return event("user_annotation", f"gloo:{name}", begin, end, GLOO)
