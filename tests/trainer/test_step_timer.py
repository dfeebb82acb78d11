"""Step times: what is in them, what is not, and that the device is asked at log steps only."""

import time

import pytest
import torch

from trainer import step_timer
from trainer.step_timer import StepTimer

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """A clock that is set by hand: clock(2.0) lets two seconds pass."""
    now = [100.0]
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_pauses_are_in_no_step(clock) -> None:
    timer = StepTimer(CPU, warm_up_steps=0)
    with timer.paused():  # validation at step 0, before training starts
        clock(50)
    timer.start()
    clock(1)
    timer.stop()
    with timer.paused():
        clock(30)
    clock(0.5)
    with timer.waiting_for_data():
        clock(0.25)
    with timer.paused():
        clock(7)
    clock(1.25)
    timer.stop()
    times = timer.collect()
    assert times.seconds == times.counted == pytest.approx([1.0, 2.0])
    assert times.first_step == 1 and times.excluded == {}
    assert times.data_wait_s == pytest.approx(0.25)


def test_time_between_steps_is_in_the_next(clock) -> None:
    timer = StepTimer(CPU, warm_up_steps=0)
    timer.start()
    clock(1)
    timer.stop()
    timer.collect()
    clock(0.5)  # writing the log
    clock(1)
    timer.stop()
    assert timer.collect().seconds == pytest.approx([1.5])


def test_excluded_steps_keep_their_time_and_reason(clock) -> None:
    timer = StepTimer(CPU, first_step=11, warm_up_steps=2)
    timer.start()
    for step in range(11, 16):
        if step == 14:
            timer.exclude("profiling")
        clock(step)
        timer.stop()
    timer.exclude("profiling")  # step 16, still under way
    times = timer.collect()
    assert times.first_step == 11 and times.seconds == pytest.approx([11, 12, 13, 14, 15])
    assert times.excluded == {11: "warm-up", 12: "warm-up", 14: "profiling"}
    assert times.counted == pytest.approx([13, 15])
    clock(16)
    timer.stop()
    later = timer.collect()
    assert (later.first_step, later.excluded, later.counted) == (16, {16: "profiling"}, [])
    assert timer.collect().seconds == []


def test_waiting_for_data_is_that_of_the_steps_collected(clock) -> None:
    timer = StepTimer(CPU, warm_up_steps=0)
    timer.start()
    for waited in (3.0, 0.5):
        with timer.waiting_for_data():
            clock(waited)
        clock(1)
        timer.stop()
        times = timer.collect()
        assert times.data_wait_s == pytest.approx(waited) and times.seconds == pytest.approx([waited + 1])


def test_a_failing_pause_is_still_left_out(clock) -> None:
    timer = StepTimer(CPU, warm_up_steps=0)
    timer.start()
    with pytest.raises(KeyError), timer.paused():
        clock(9)
        raise KeyError
    clock(1)
    timer.stop()
    assert timer.collect().seconds == pytest.approx([1.0])


class FakeEvent:
    """torch.cuda.Event that counts how often the host asks for anything."""

    asked = 0
    clock = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        FakeEvent.asked += 1

    def elapsed_time(self, other: "FakeEvent") -> float:
        FakeEvent.asked += 1
        return other.at - self.at  # milliseconds


def test_events_are_read_at_collect_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    timer = StepTimer(torch.device("cuda"), warm_up_steps=0)
    timer.start()
    for _ in range(3):
        FakeEvent.clock += 20.0
        timer.stop()
        with timer.paused():
            FakeEvent.clock += 500.0
    assert FakeEvent.asked == 0
    assert timer.collect().seconds == pytest.approx([0.02, 0.02, 0.02])
    assert FakeEvent.asked > 0


@pytest.mark.gpu
def test_gpu_step_times_cover_the_kernels_and_not_the_pause() -> None:
    device = torch.device("cuda")
    x = torch.randn(8192, 8192, device=device)
    x @ x
    torch.cuda.synchronize()
    timer = StepTimer(device, warm_up_steps=0)
    begin = time.perf_counter()
    timer.start()
    for _ in range(4):
        for _ in range(20):
            x @ x
        timer.stop()
    queued = time.perf_counter() - begin
    with timer.paused():
        time.sleep(0.5)
    timer.stop()
    times = timer.collect().seconds
    assert sum(times[:4]) > 2 * queued, "the host did not wait for the kernels, the times did"
    assert times[4] < 0.25
