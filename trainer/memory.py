"""Peak memory of a log window and of the parts of a step: of the allocator on a GPU, resident memory on the CPU.

All figures are counters that the allocator keeps on the host: reading them waits for no device.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys

import torch

from trainer.spans import watch_spans

GIB = 1024**3
KINDS = ("active", "reserved")

logger = logging.getLogger(__name__)


class PeakMemory:
    """Peaks since the last ``collect`` (or since this was made) on ``device``."""

    def __init__(self, device: torch.device):
        self._device = device
        self._warned = (0, 0)
        self._window = dict.fromkeys(KINDS, 0)
        self._parts: dict[str, dict[str, int]] = {}
        self._reset()

    def by_part(self) -> contextlib.AbstractContextManager[None]:
        """Within it, the peaks of each part of training (trainer/spans.py) are kept apart, for the next ``collect``. A
        part has what was before it since the part that ended last. Off a GPU nothing happens.
        """
        return watch_spans(self._end_part) if self._device.type == "cuda" else contextlib.nullcontext()

    def _end_part(self, name: str) -> None:
        peaks = self._peaks()
        for held in (self._window, self._parts.setdefault(name, dict.fromkeys(KINDS, 0))):
            held.update({kind: max(held[kind], peak) for kind, peak in peaks.items()})
        torch.cuda.reset_peak_memory_stats(self._device)

    def _peaks(self) -> dict[str, int]:
        """Bytes, since the last reset."""
        stats = torch.cuda.memory_stats(self._device)
        return {kind: stats.get(f"{kind}_bytes.all.peak", 0) for kind in KINDS}

    def collect(self) -> dict[str, float]:
        """Tag -> value, and begin a new window. GiB, percent of the device's memory, counts since the process began.

        On a GPU: active and reserved memory of PyTorch's allocator and the difference of their peaks, fragmentation, of
        the window and of each part (:meth:`by_part`); its retries and out-of-memory errors. Elsewhere
        ``memory/max_rss(GiB)``: the most memory of this process that was resident, code and libraries included.
        """
        values = self._cuda() if self._device.type == "cuda" else {"memory/max_rss(GiB)": _peak_resident_bytes() / GIB}
        self._reset()
        return values

    def _cuda(self) -> dict[str, float]:
        stats = torch.cuda.memory_stats(self._device)
        capacity = torch.cuda.get_device_properties(self._device).total_memory
        values: dict[str, float] = {}
        peaks = {kind: max(peak, self._window[kind]) for kind, peak in self._peaks().items()}
        for kind, peak in peaks.items():
            values[f"memory/max_{kind}(GiB)"] = peak / GIB
            values[f"memory/max_{kind}(%)"] = 100 * peak / capacity
        values["memory/fragmentation(GiB)"] = (peaks["reserved"] - peaks["active"]) / GIB
        for part, held in self._parts.items():
            values |= {f"memory/{part}_max_{kind}(GiB)": peak / GIB for kind, peak in held.items()}
            values[f"memory/{part}_fragmentation(GiB)"] = (held["reserved"] - held["active"]) / GIB
        retries, errors = stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)
        if (retries, errors) != self._warned:
            self._warned = (retries, errors)
            logger.warning(
                "GPU memory is short: %d allocation retries and %d out-of-memory errors so far. A retry frees cached "
                "memory and waits for the device, so this run's throughput is not comparable.",
                retries,
                errors,
            )
        values["memory/num_alloc_retries"] = retries
        values["memory/num_ooms"] = errors
        return values

    def _reset(self) -> None:
        self._window, self._parts = dict.fromkeys(KINDS, 0), {}
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_peak_resident()


def _peak_resident_bytes() -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_peak_resident() -> None:
    """Linux sets the high-water mark back to the present size. Elsewhere the peak is that of the whole process."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")
    except OSError:
        pass
