"""Parts of training: ranges while a profiler records, a name on what goes wrong, nothing else."""

import pytest
import torch

from trainer import spans
from trainer.spans import part_of, span


def test_a_range_appears_with_its_detail_while_a_profiler_records():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with span("forward", "stage 1 micro-batch 2"), span("inner"):
            pass
    names = {event.key for event in profile.key_averages()}
    assert {"train/forward stage 1 micro-batch 2", "train/inner"} <= names


def test_no_range_is_made_without_one(monkeypatch):
    def never(name):
        raise AssertionError(name)

    monkeypatch.setattr(spans, "record_function", never)
    with span("forward"):
        pass


def test_an_exception_names_the_innermost_part():
    with pytest.raises(ValueError, match="x") as caught:
        with span("forward"), span("inner"):
            raise ValueError("x")
    assert part_of(caught.value) == "inner" and part_of(ValueError()) == ""
