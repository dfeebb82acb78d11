"""What is written and printed of a run, and that no figure lies."""

import json
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from config.arithmetic import Flops
from config.schema import Config
from trainer import metrics as module
from trainer.console import console_line, duration
from trainer.metrics import Metrics
from trainer.run_directory import RunDirectory
from trainer.step_timer import StepTimes

FLOPS = Flops(torchtitan=2_000_000, causal_with_head=1_000_000)
VALIDATION = {
    "validation_metrics/loss": 2.9,
    "validation_metrics/perplexity": 18.2,
    "validation_metrics/bits_per_byte": 2.1,
}
NOT_SCALARS = ("step", "tokens", "wall_s", "step_times_s", "excluded_steps")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "config.toml").write_text("[training]\nsteps = 60\n")
    (tmp_path / "environment.json").write_text('{"torch": "2.13.0"}\n')
    return RunDirectory(tmp_path, "new", None, {"base_diff": {"training.steps": [10000, 60]}})


def config(**keys) -> Config:
    made = Config()
    made.training.steps = 60
    for key, value in keys.items():
        section, name = key.split("__")
        setattr(getattr(made, section), name, value)
    return made


def make(run: RunDirectory | None, settings: Config | None = None, **keys) -> Metrics:
    arguments = {"device": torch.device("cpu"), "world_size": 2, "tokens_per_step": 1000, "flops": FLOPS, **keys}
    return Metrics(run, settings or config(), **arguments)


def log(metrics: Metrics, step: int, times: StepTimes, **keys) -> None:
    metrics.log(step, **{"loss": 2.8123, "max_loss": 2.9, "grad_norm": 0.91, "lr": 8e-4, "times": times, **keys})


def lines(run: RunDirectory) -> list[dict]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_and_tensorboard_hold_the_same(run: RunDirectory) -> None:
    metrics = make(run)
    metrics.log_validation(0, VALIDATION)
    log(metrics, 10, StepTimes(1, [9.0] + [0.5] * 9, {1: "warm-up"}, 0.27), extra={"moe/dead_experts": 1.0})
    log(metrics, 20, StepTimes(11, [0.4] * 10, {}, 0.0), validation=VALIDATION)
    written = lines(run)  # before close: every line is flushed
    metrics.close()

    assert [row["step"] for row in written] == [0, 10, 20]
    assert [row["tokens"] for row in written] == [0, 10_000, 20_000]
    assert 0 <= written[0]["wall_s"] <= written[1]["wall_s"] <= written[2]["wall_s"]
    assert written[1]["step_times_s"] == [9.0] + [0.5] * 9 and written[1]["excluded_steps"] == [1]
    assert written[1]["loss_metrics/global_avg_loss"] == 2.8123 and written[1]["moe/dead_experts"] == 1.0
    assert written[2]["validation_metrics/bits_per_byte"] == 2.1 and "validation_metrics/loss" not in written[1]

    events = EventAccumulator(str(run.path / "tb"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    seen: dict[int, dict[str, float]] = {0: {}, 10: {}, 20: {}}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            seen[event.step][tag] = event.value
    for row in written:
        scalars = {k: v for k, v in row.items() if k not in NOT_SCALARS}
        assert seen[row["step"]] == pytest.approx(scalars, rel=1e-6)

    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert "steps = 60" in texts["config/text_summary"]
    assert "training.steps: 10000 -> 60" in texts["difference_from_base/text_summary"]
    assert '"torch": "2.13.0"' in texts["environment/text_summary"]


def test_throughput_is_unique_tokens_over_counted_step_time(run: RunDirectory) -> None:
    metrics = make(run)
    log(metrics, 4, StepTimes(1, [9.0, 0.5, 0.7, 7.0], {1: "warm-up", 4: "profiling"}, 1.72))
    row = lines(run)[0]
    assert row["time_metrics/end_to_end(s)"] == pytest.approx(0.6)
    assert row["throughput(tps)"] == pytest.approx(1000 / 2 / 0.6)  # two devices share a global batch of 1000 tokens
    assert row["tflops"] == pytest.approx(2e6 * 1000 / 2 / 0.6 / 1e12)
    assert row["tflops_causal"] == pytest.approx(row["tflops"] / 2)
    assert row["time_metrics/data_loading(s)"] == pytest.approx(0.43)
    assert row["time_metrics/data_loading(%)"] == pytest.approx(10.0)
    assert not any("mfu" in tag for tag in row), "the peak of a CPU is not known"
    assert not any("active" in tag for tag in row) and row["memory/max_rss(GiB)"] > 0


def test_a_window_of_warm_up_has_no_throughput(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = make(run)
    log(metrics, 1, StepTimes(1, [9.0], {1: "warm-up"}))
    row = lines(run)[0]
    assert row["step_times_s"] == [9.0]
    assert not {"throughput(tps)", "tflops", "time_metrics/end_to_end(s)"} & set(row)
    assert "tps (warm-up)" in capsys.readouterr().out


def gpu(monkeypatch: pytest.MonkeyPatch, peak: float) -> None:
    """A CUDA device as far as Metrics looks at one."""
    memory = {"memory/max_active(GiB)": 1.1, "memory/max_reserved(GiB)": 1.31}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    monkeypatch.setattr(module.titan, "peak_flops", lambda name: peak)
    monkeypatch.setattr(module, "PeakMemory", lambda device: type("P", (), {"collect": lambda self: dict(memory)})())


def test_the_line_a_user_sees(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu(monkeypatch, 264e9)
    metrics = make(run, device=torch.device("cuda"), world_size=1, tokens_per_step=41_200)
    log(metrics, 20, StepTimes(1, [1.0] * 20, {}))
    log(metrics, 21, StepTimes(21, [1.0], {}), validation=VALIDATION, grad_norm=0.0123)
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "step 20/60  33%  loss 2.8123  gnorm 0.91  lr 8.00e-04  mem 1.3GiB  tps 41,200  tflops 0.082  mfu 31.2%"
        "  eta 0:40"
    )
    assert "gnorm 1.2e-02" in out[1] and re.search(r"eta 0:0\d$", out[1]), "the pace is now that of the wall clock"
    assert out[2] == "validation 21/60  35%  loss 2.9000  perplexity 18.2000  bits per byte 2.1000"
    row = lines(run)[0]
    assert row["mfu(%)"] == pytest.approx(100 * 2e6 * 41_200 / 264e9)
    assert row["mfu_causal(%)"] == pytest.approx(row["mfu(%)"] / 2)


def test_utilisation_is_of_each_devices_own_peak(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 1e9)
    metrics = make(run, device=torch.device("cuda"), world_size=4)
    log(metrics, 5, StepTimes(1, [1.0] * 5, {}))
    row = lines(run)[0]
    # Four devices share 1,000 tokens of 2e6 operations a second: each does 5e8 of the 1e9 that it can.
    assert (row["throughput(tps)"], row["mfu(%)"], row["mfu_causal(%)"]) == pytest.approx((250.0, 50.0, 25.0))


def test_above_the_peak_is_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 0.9e12)
    metrics = make(run, device=torch.device("cuda"), world_size=1, tokens_per_step=1_000_000)
    with pytest.raises(RuntimeError, match=r"1\.0 TFLOP/s a device is above its peak of 0\.9.*1,000,000 tokens/s"):
        log(metrics, 1, StepTimes(1, [1.0], {}))
    assert lines(run) == []


def test_a_formula_above_the_peak_is_left_out_and_said_once(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu(monkeypatch, 1.5e12)  # torchtitan's count gives 2.0e12, the causal one 1.0e12
    metrics = make(run, device=torch.device("cuda"), world_size=1, tokens_per_step=1_000_000)
    for step in (1, 2):
        log(metrics, step, StepTimes(step, [1.0], {}))
    for row in lines(run):
        assert "tflops" not in row and "mfu(%)" not in row and row["tflops_causal"] == pytest.approx(1.0)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "2.0 TFLOP/s" in warnings[0] and "peak of 1.5" in warnings[0]


def test_log_steps(run: RunDirectory) -> None:
    metrics = make(run, config(metrics__log_freq=25))
    assert [step for step in range(1, 61) if metrics.should_log(step)] == [1, 25, 50, 60]


def test_other_ranks_write_and_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = make(None)
    metrics.log_validation(0, VALIDATION)
    log(metrics, 1, StepTimes(1, [1.0], {}), validation=VALIDATION)
    metrics.close()
    assert capsys.readouterr().out == ""


def test_without_tensorboard(run: RunDirectory) -> None:
    metrics = make(run, config(metrics__enable_tensorboard=False))
    log(metrics, 1, StepTimes(1, [1.0], {}))
    metrics.close()
    assert len(lines(run)) == 1 and not (run.path / "tb").exists()


def test_a_loss_that_is_not_finite_is_kept_as_such(run: RunDirectory) -> None:
    metrics = make(run)
    log(metrics, 1, StepTimes(1, [1.0], {}), loss=float("nan"), max_loss=float("inf"))
    row = lines(run)[0]
    assert row["loss_metrics/global_avg_loss"] != row["loss_metrics/global_avg_loss"]
    assert row["loss_metrics/global_max_loss"] == float("inf")


@pytest.mark.parametrize(
    ("terminal", "no_color", "disabled", "coloured"),
    [(True, "", False, True), (False, "", False, False), (True, "1", False, False), (True, "", True, False)],
)
def test_colour_on_a_terminal_unless_disabled(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    no_color: str,
    disabled: bool,
    coloured: bool,
) -> None:
    metrics = make(run, config(metrics__disable_color_printing=disabled))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    log(metrics, 1, StepTimes(1, [1.0], {}))
    out = capsys.readouterr().out
    assert ("\033[" in out) == coloured
    assert re.sub(r"\033\[\d+m", "", out).startswith("step  1/60   1%  loss 2.8123  gnorm 0.91")


def test_console_line_and_duration() -> None:
    assert console_line({"loss": "1.0", "eta": "0:01"}, colour=True) == "\033[32mloss 1.0\033[0m  eta 0:01"
    expected = {0: "0:00", 42.4: "0:42", 59.6: "1:00", 3599.6: "1:00:00", 7325: "2:02:05", 90061: "1d 1:01:01"}
    assert {seconds: duration(seconds) for seconds in expected} == expected


def test_padding_is_not_throughput(run, capsys):
    metrics = make(run)
    log(metrics, 5, times=StepTimes(4, [9.0, 1.0], {4: "warm-up"}), fill_rates=[0.1, 0.75])
    line = lines(run)[-1]
    assert line["throughput(tps)"] == 0.75 * 1000 / 2
    assert line["data/fill_rate"] == (0.1 + 0.75) / 2  # of all steps since the last line, timed or not
    assert "  filled 42.5%" in capsys.readouterr().out
    log(metrics, 10, times=StepTimes(6, [1.0], {}), fill_rates=[1.0])
    assert "filled" not in capsys.readouterr().out
