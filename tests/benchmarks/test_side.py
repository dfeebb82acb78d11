import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.side import RunFailed, Setting, TooSlow, execute, parse_settings, reason_of
from benchmarks.side_ours import Arm, Ours
from benchmarks.side_torchtitan import Torchtitan, parse_log
from benchmarks.workloads import WORKLOADS
from config.errors import ConfigError
from config.load import load
from config.world import check_world

LOG = """\
[rank0]:[titan] 2026-11-30 16:21:15,034 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.27892  \x1b[38;2;180;60;0m\
grad_norm:  3.1903  \x1b[38;2;54;234;195mmemory: 22.84GiB(16.34%)  \x1b[34mtps: 1,632  \x1b[36mtflops: 14.73  \
\x1b[35mmfu: 1.49%\x1b[39m
[rank0]:[titan] 2026-11-30 16:21:15,034 - root - INFO - Synchronizing and adjusting timeout for all ProcessGroups
[rank0]:[titan] 2026-11-30 16:21:18,222 - root - INFO - step: 10  loss:  7.69791  grad_norm:  3.5414  memory: \
34.16GiB(24.43%)  tps: 55,390  tflops: 1,499.92  mfu: 50.55%
"""


def test_torchtitans_lines_are_read_with_colours_and_thousands() -> None:
    assert parse_log(LOG) == [
        {"step": 1, "loss": 12.27892, "reserved_gib": 22.84, "tokens_per_s": 1632.0, "tflops": 14.73},
        {"step": 10, "loss": 7.69791, "reserved_gib": 34.16, "tokens_per_s": 55390.0, "tflops": 1499.92},
    ]


def test_a_missing_torchtitan_is_said_with_the_remedy(tmp_path: Path) -> None:
    assert "--peer_path" in (Torchtitan(None).missing() or "")
    assert f"{tmp_path} holds none" in (Torchtitan(str(tmp_path)).missing() or "")
    for version, there in (("0.3.0", False), ("0.2.2", True)):
        site = tmp_path / version
        (site / f"torchtitan-{version}.dist-info").mkdir(parents=True)
        (site / f"torchtitan-{version}.dist-info" / "METADATA").write_text(f"Name: torchtitan\nVersion: {version}\n")
        assert (Torchtitan(str(site)).missing() is None) == there


def test_settings_are_a_batch_and_words() -> None:
    workload = WORKLOADS["moe_7b"]
    assert parse_settings("8, 4+full+eager", Ours(), workload) == [Setting(8), Setting(4, ("full", "eager"))]
    assert str(Setting(4, ("full", "eager"))) == "4+full+eager"


@pytest.mark.parametrize("text, said", [("3", "divides the 8"), ("full", "divides the 8"), ("0", "divides the 8"),
                                        ("4+flash", "no 'flash'; words: none, op, full, eager, direct")])  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_settings(text, Ours(), WORKLOADS["moe_7b"])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_settings_of_every_workload_can_be(workload: str) -> None:
    from benchmarks.side_transformers import Transformers

    settings = WORKLOADS[workload].settings
    assert "ours" in settings and len(settings) > 1
    assert ("torchtitan" in settings) == (WORKLOADS[workload].torchtitan is not None)
    for side in (Ours(), Torchtitan(None), Transformers(), Arm()):
        if side.name in settings:
            parse_settings(settings[side.name], side, WORKLOADS[workload])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_our_command_is_a_legal_run_under_every_setting(workload: str) -> None:
    found = WORKLOADS[workload]
    for side in (side for side in (Ours(), Arm()) if side.name in found.settings):
        for setting in parse_settings(found.settings[side.name], side, found):
            words = [option for word in setting.words for option in side.words[word]]
            batch = ["--training.local_batch_size", str(setting.batch)]
            step = ["--training.global_batch_size", str(2 * found.sequences)]
            check_world(load(["--job.config_file", found.config, *batch, *step, *words]).config, 2)


def test_the_reason_of_a_failure_is_its_own_error() -> None:
    log = "[rank0]: Traceback\n[rank0]: ValueError: no such flavor\ntorch.multiprocessing.ChildFailedError: \n"
    assert reason_of(1, log) == "exit code 1: ValueError: no such flavor"
    assert reason_of(1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate") == "out of memory"
    assert reason_of(-9, "nothing") == "exit code -9"
    refused = 'Attention: sdpa\nmoe.experts = "quack" needs quack-kernels. Install it.\n'
    assert reason_of(2, refused) == 'exit code 2: moe.experts = "quack" needs quack-kernels. Install it.'
    assert reason_of(2, "") == "exit code 2"


def test_output_and_failures_of_a_command() -> None:
    assert execute([sys.executable, "-c", "print('so')"], Path("."), 60) == "so\n"
    with pytest.raises(RunFailed, match="exit code 1: KeyError: 'k'") as failed:
        execute([sys.executable, "-c", "{}['k']"], Path("."), 60)
    assert failed.value.command[0] == "python" and "Traceback" in failed.value.log_tail


def test_a_command_out_of_time_ends_with_its_children(tmp_path: Path) -> None:
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(TooSlow):
        execute([sys.executable, "-c", parent], tmp_path, 3)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):  # a killed process may still have to be collected
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail("the child outlived its parent")
