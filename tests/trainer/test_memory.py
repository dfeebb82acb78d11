"""Peaks per log window."""

import pytest
import torch

from trainer.memory import PeakMemory


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
