import json
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks.compare import main, parser, wanted_rows
from benchmarks.workloads import WORKLOADS
from config.errors import ConfigError


def wanted(*words: str) -> dict[str, list[str]]:
    return wanted_rows(parser().parse_args(list(words)))


def test_rows_are_workloads_beside_their_peers() -> None:
    both = ["torchtitan", "transformers"]
    assert wanted("dense_1b", "moe_7b-transformers", "debug_moe-arm") == {
        "dense_1b": both, "moe_7b": ["transformers"], "debug_moe": ["arm"],
    }  # fmt: skip
    rows = wanted("--all")
    assert [rows[name] for name in ("moe_7b", "moe_7b_ep2", "moe_7b_float8")] == [both, ["torchtitan", "arm"], ["arm"]]
    assert set(rows) | {"debug", "debug_moe"} == set(WORKLOADS)
    assert wanted("moe_7b-transformers", "moe_7b") == {"moe_7b": ["transformers", "torchtitan"]}


@pytest.mark.parametrize(
    "words, said",
    [([], "name a workload"), (["dense"], "no workload 'dense'"), (["debug-torchtitan"], "not with 'torchtitan'")],
)
def test_rows_that_are_none_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wanted(*words)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine without asking it, which takes seconds."""
    monkeypatch.setattr(compare, "machine", lambda: {"gpu_name": None, "gpu_count": 0, "torch": "2.13.0"})


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize(
    "words, said",
    [
        (["debug", "--timed_steps", "12"], "a multiple of 5"),
        (["debug", "--timed_steps", "0"], "a multiple of 5"),
        (["debug", "--ngpu", "0"], "--ngpu 0"),
        (["debug", "--ours_settings", "3"], "divides the 4 sequences"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("cpu")
def test_a_missing_peer_is_said_and_its_row_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measured(workload, peers, arguments, machine):  # type: ignore[no-untyped-def]
        asked.append([peer.name for peer in peers])
        return True

    monkeypatch.setattr(compare, "compare", measured)
    monkeypatch.setattr(compare.Transformers, "missing", lambda self: None)
    assert main(["dense_1b", "--out", str(tmp_path)]) == 3
    assert "Left out: torchtitan: no --peer_path" in capsys.readouterr().out
    assert asked == [["transformers"]]
    assert main(["dense_1b-transformers", "--out", str(tmp_path)]) == 0, "torchtitan was not asked for"
    monkeypatch.setattr(compare.Transformers, "missing", lambda self: "transformers: not installed")
    assert main(["dense_1b", "--out", str(tmp_path)]) == 3
    assert len(asked) == 2


def test_ours_and_transformers_train_on_the_same_tokens_and_a_measured_row_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole path on a CPU. Speed is not looked at; losses are, as both read the same tokens at the same rates."""
    pytest.importorskip("transformers")
    words = ["debug", "--once", "--timed_steps", "5", "--commit", "here", "--out", str(tmp_path)]
    words += ["--transformers_settings", "2"]
    assert main(words) == 0
    raw = json.loads((tmp_path / "debug-transformers-1gpu-cpu.json").read_text())
    runs = {run["side"]: run for run in raw["runs"]}
    assert [len(run["step_times_s"]) for run in runs.values()] == [10, 10]
    ours, peer = runs["ours"]["losses"], runs["transformers"]["losses"]
    assert ours.keys() == {"1", "5", "10"} and len(peer) == 10
    for step, loss in ours.items():
        assert peer[step] == pytest.approx(loss, rel=0.06), f"step {step}: other weights, but the same data"
    assert float(peer["1"]) > float(peer["10"]) + 2
    assert runs["transformers"]["setting"] == "2", "two micro-batches a step"
    assert raw["environment"]["torch"] and raw["tokens_per_step"] == 256
    capsys.readouterr()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Measured already" in said and "debug beside transformers" in said
    assert json.loads((tmp_path / "debug-transformers-1gpu-cpu.json").read_text()) == raw
