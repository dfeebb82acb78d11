"""What is said when memory runs out."""

from types import SimpleNamespace

import pytest
import torch

from trainer.memory_snapshot import out_of_memory
from trainer.spans import span


def raised(text, *parts):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        with span(parts[0]) if parts else span("building"):
            raise torch.OutOfMemoryError(text)
    return caught.value


def test_the_message_names_the_step_the_part_and_the_peaks(monkeypatch):
    gib = 1024**3
    stats = {"active_bytes.all.peak": 70 * gib, "reserved_bytes.all.peak": 78 * gib}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * gib))
    error = raised("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of ...", "backward")
    assert out_of_memory(error, step=12, rank=3, device=torch.device("cuda")) == (
        "out of memory in step 12, backward, on rank 3: 2.50 GiB more were asked for;"
        " peak active 70.00 GiB, peak reserved 78.00 GiB of 80.00 GiB"
    )


def test_before_the_first_step_and_without_a_size():
    error = torch.OutOfMemoryError("no size in it")
    assert out_of_memory(error, step=0, rank=0, device=torch.device("cpu")) == (
        "out of memory before the first step, on rank 0"
    )
