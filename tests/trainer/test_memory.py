"""Peaks per log window."""

from types import SimpleNamespace

import pytest
import torch

from trainer.memory import GIB, PeakMemory
from trainer.spans import BACKWARD, FORWARD, OPTIMIZER, span


def test_resident_memory_peak_is_that_of_the_window() -> None:
    memory = PeakMemory(torch.device("cpu"))
    baseline = memory.collect()["memory/max_rss(GiB)"]
    block = torch.ones(64 * 1024**2)  # 256 MiB
    del block
    assert set(memory.collect()) == {"memory/max_rss(GiB)"}
    block = torch.ones(64 * 1024**2)
    del block
    with_block = memory.collect()["memory/max_rss(GiB)"]
    after = memory.collect()["memory/max_rss(GiB)"]
    assert 0.01 < baseline
    assert with_block - after == pytest.approx(0.25, abs=0.1), "the window after the block does not see it"


@pytest.mark.gpu
def test_gpu_memory_peak_is_that_of_the_window() -> None:
    memory = PeakMemory(torch.device("cuda"))
    block = torch.empty(1024**3, dtype=torch.uint8, device="cuda")
    del block
    first, second = memory.collect(), memory.collect()
    assert first["memory/max_active(GiB)"] >= 1.0 > second["memory/max_active(GiB)"]
    assert 0 < first["memory/max_active(%)"] <= first["memory/max_reserved(%)"] < 100
    assert first["memory/num_alloc_retries"] == first["memory/num_ooms"] == 0


class FakeAllocator:
    """What torch.cuda says of an allocator: bytes in use, and their peaks since the last reset."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.active = self.reserved = self.peak = self.peak_reserved = 0
        properties = SimpleNamespace(total_memory=100 * GIB)
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: self.stats())
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.reset())
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def hold(self, gib: int) -> None:
        self.active = gib * GIB
        self.reserved = max(self.reserved, self.active + GIB)
        self.peak, self.peak_reserved = max(self.peak, self.active), max(self.peak_reserved, self.reserved)

    def stats(self) -> dict[str, int]:
        return {"active_bytes.all.peak": self.peak, "reserved_bytes.all.peak": self.peak_reserved}

    def reset(self) -> None:
        self.peak, self.peak_reserved = self.active, self.reserved


def test_parts_of_a_step_have_peaks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch)
    memory = PeakMemory(torch.device("cuda"))
    allocator.hold(50)  # an earlier step of the window, which is not watched
    allocator.hold(10)
    with memory.by_part():
        for forward, backward in ((30, 40), (35, 20)):  # two micro-batches
            with span(FORWARD):
                allocator.hold(forward)
            with span(BACKWARD):
                allocator.hold(backward)
                allocator.hold(15)
        with span(OPTIMIZER):
            allocator.hold(12)
    allocator.hold(60)
    with span(FORWARD):
        allocator.hold(70)  # not watched: of the window alone
    values = memory.collect()
    peaks = {part: values[f"memory/{part}_max_active(GiB)"] for part in (FORWARD, BACKWARD, OPTIMIZER)}
    assert peaks == {FORWARD: 50, BACKWARD: 40, OPTIMIZER: 15}
    assert values["memory/backward_fragmentation(GiB)"] == 51 - 40
    assert values["memory/max_active(GiB)"] == 70 and values["memory/fragmentation(GiB)"] == 1
    assert not [tag for tag in memory.collect() if "forward" in tag], "a new window"
    with memory.by_part(), span(BACKWARD):
        allocator.hold(80)
        allocator.hold(15)
    values = memory.collect()  # the window's peak was in a part, whose end reset the allocator's
    assert values["memory/max_active(GiB)"] == values["memory/backward_max_active(GiB)"] == 80


def test_a_part_that_runs_out_of_memory_leaves_the_peak_for_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch)
    memory = PeakMemory(torch.device("cuda"))
    with pytest.raises(RuntimeError), memory.by_part(), span(BACKWARD):
        allocator.hold(90)
        allocator.hold(5)
        raise RuntimeError
    assert torch.cuda.memory_stats(None)["active_bytes.all.peak"] == 90 * GIB


def test_on_a_cpu_parts_are_not_watched() -> None:
    with PeakMemory(torch.device("cpu")).by_part(), span(FORWARD):
        pass


@pytest.mark.gpu
def test_gpu_parts_see_what_they_hold_and_the_window_the_most() -> None:
    memory = PeakMemory(torch.device("cuda"))
    with memory.by_part():
        with span(FORWARD):
            block = torch.empty(1024**3, dtype=torch.uint8, device="cuda")
            del block
        with span(BACKWARD):
            block = torch.empty(1024**3 // 2, dtype=torch.uint8, device="cuda")
            del block
    values = memory.collect()
    forward, backward = (values[f"memory/{part}_max_active(GiB)"] for part in (FORWARD, BACKWARD))
    assert forward - backward == pytest.approx(0.5)
    assert values["memory/max_active(GiB)"] == max(forward, backward)
    assert values["memory/forward_fragmentation(GiB)"] >= 0
