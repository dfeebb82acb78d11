"""The split of a step's time on made-up traces whose answer is known by counting."""

import json

import pytest

from tests.trainer.events import gloo, kernel, op, part
from trainer.time_split import PARTS, split
from trainer.trace import read_window

STEP = [part("window", 0, 1000), part("data", 0, 30), part("forward", 30, 100), part("backward", 100, 200)]
STEP += [part("optimizer", 200, 210)]


def microseconds(events, steps=1):
    found = split(read_window(events), steps)
    assert sum(found.seconds.values()) == pytest.approx(found.step_s)
    assert set(found.seconds) == set(PARTS)
    return {name: round(seconds * 1e6, 6) for name, seconds in found.seconds.items() if seconds}, found


def test_communication_is_exposed_where_nothing_else_runs():
    """Union of communication minus union of all other work, over streams that overlap."""
    seconds, found = microseconds(
        [
            *STEP,
            *kernel("nvjet_forward", 100, 300, launched=40),
            *kernel("ncclDevKernel_AllGather", 200, 400, launched=41, stream=20),
            *kernel("ncclDevKernel_AllGather", 390, 420, launched=42, stream=24),
            *kernel("nvjet_backward", 410, 700, launched=150),
            *kernel("ncclDevKernel_ReduceScatter", 600, 750, launched=160, stream=20),
            *kernel("adam", 800, 900, launched=205),
        ]
    )
    assert seconds == {
        "forward": 200,
        "backward": 290,
        "optimizer": 100,
        "exposed_communication": 110 + 50,
        "data_wait": 30,
        "idle": 70 + 50 + 100,
    }
    assert found.communication_s == pytest.approx(370e-6)
    assert found.tags()["comm/exposed(%)"] == pytest.approx(16.0)
    assert found.tags()["comm/total(%)"] == pytest.approx(37.0)
    assert found.tags()["profiling/backward(s)"] == pytest.approx(290e-6)


def test_waiting_for_data_counts_while_the_device_is_idle_only():
    busy = kernel("nvjet", 0, 20, launched=35)
    assert microseconds([*STEP, *busy])[0] == {"forward": 20, "data_wait": 10, "idle": 970}


def test_a_moment_of_two_streams_is_counted_once():
    streams = [*kernel("nvjet_f", 100, 300, launched=40), *kernel("nvjet_b", 200, 400, launched=110, stream=9)]
    assert microseconds([*STEP, *streams])[0] == {"forward": 200, "backward": 100, "data_wait": 30, "idle": 670}


def test_work_outside_the_window_is_left_out():
    ends = [*kernel("nvjet", -50, 50, launched=40), *kernel("ncclDevKernel_SendRecv", 990, 1100, launched=150)]
    seconds = microseconds([*STEP, *ends])[0]
    assert (seconds["forward"], seconds["exposed_communication"]) == (50, 10)


def test_a_mean_over_the_steps_of_a_window():
    seconds, found = microseconds([*STEP, *kernel("nvjet", 100, 300, launched=40)], steps=4)
    assert seconds["forward"] == 50 and found.step_s == pytest.approx(250e-6)


def test_on_a_cpu_the_main_thread_is_the_device():
    """Forward, backward and optimizer are wall time in their ranges, less where only communication went on."""
    seconds, found = microseconds(
        [
            part("window", 0, 1000),
            part("data", 0, 100),
            part("forward", 100, 400),
            part("backward stage 1 micro-batch 0", 400, 800),
            part("optimizer", 800, 900),
            part("validation", 900, 950),
            op("aten::mm", 100, 250),
            gloo("all_gather", 200, 350),  # 100 of it while the main thread waits
            op("aten::mm", 400, 700),
            gloo("all_reduce", 600, 700),
            op("c10d::allreduce_", 700, 750),
            gloo("all_reduce", 700, 750),  # posting a message is no other work
        ]
    )
    assert seconds == {
        "forward": 200,
        "backward": 350,
        "optimizer": 100,
        "other": 50,
        "exposed_communication": 150,
        "data_wait": 100,
        "idle": 50,
    }
    assert found.communication_s == pytest.approx(300e-6)


def test_waiting_inside_a_backward_node_is_no_work():
    """FSDP's hooks wait for gloo inside what autograd wraps around operators."""
    seconds = microseconds(
        [
            part("window", 0, 100),
            part("backward", 0, 100),
            op("autograd::engine::evaluate_function: AddmmBackward0", 0, 90),
            op("AddmmBackward0", 0, 80),
            op("aten::mm", 0, 30),
            gloo("all_gather", 20, 70),
        ]
    )[0]
    assert seconds == {"backward": 60, "exposed_communication": 40}


def test_what_is_written_names_each_part_and_says_what_it_is():
    for work, words in ((kernel("nvjet", 100, 300, launched=40), "launches come too late"), ([], "gloo has messages")):
        found = split(read_window([*STEP, *work]), 1)
        text, record = found.render(), json.loads(json.dumps(found.record()))
        assert all(part.replace("_", " ") in text for part in PARTS) and words in text
        assert record["parts_s"] == found.seconds and set(record["meaning"]) == set(PARTS)
