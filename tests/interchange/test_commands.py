"""The commands, and a training run that begins from a folder and ends in one, as a user runs them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config.errors import ConfigError
from interchange.__main__ import main
from interchange.runs import check_interchange
from tests.interchange.saved_runs import configuration, save_run
from tests.test_train import ON_CPU, ROOT, launch, lines

TAG = "validation_metrics/loss"


def test_import_and_export(folders, tmp_path, capsys):
    folder, imported = folders("qwen3, tied")
    assert main(["import", str(folder), str(tmp_path / "start")]) == 0
    said = capsys.readouterr().out
    assert f'initial_load_path = "{tmp_path / "start"}"' in said and 'name = "qwen3"' in said
    run_dir = save_run(configuration(imported / "model.toml"), tmp_path / "run")
    for out, options in (("a", []), ("b", ["--step", "1", "--dtype=bfloat16"])):
        assert main(["export", str(run_dir), str(tmp_path / out), *options]) == 0
        assert "wrote" in capsys.readouterr().out
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    sizes = [(tmp_path / out / "model.safetensors").stat().st_size for out in ("a", "b")]
    assert 1.7 < sizes[0] / sizes[1] < 2.1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["export", "nowhere", "out"], "nowhere: no run directory"),
        (["import", "nowhere", "out"], "config.json: No such file or directory"),
        (["export", "{run}", "out", "--step", "7"], "--step 7: {run}/checkpoint holds steps 1"),
        (["export", "{run}", "out", "--step", "x"], "--step x: expected the number of a step"),
        (["export", "{run}", "out", "--dtype", "int8"], "--dtype int8: expected one of float32, bfloat16"),
        (["export", "{run}", "{run}/config.toml/out"], "{run}/config.toml/out.part: Not a directory. Choose another"),
        (["export", "{run}"], "not a command"),
        (["import", "a", "b", "--step", "1"], "--step: not an option of import"),
        (["exprot", "a", "b"], "not a command"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments, part, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = save_run(configuration(folders("llama")[1] / "model.toml"), tmp_path / "run")
    assert main([a.replace("{run}", str(run)) for a in arguments]) == 2
    shown = capsys.readouterr()
    assert part.replace("{run}", str(run)) in shown.err and not shown.out
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "interchange", "export", "nowhere", "x"], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 2 and b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    "environment", [ON_CPU, pytest.param(dict(os.environ), marks=pytest.mark.multi_gpu)], ids=["cpu", "gpu"]
)
def test_a_run_ends_in_a_folder_and_another_begins_from_it(environment, tmp_path):
    """The second run's loss before its first step is the first one's after its last, on another mesh."""
    options = ["--validation.freq", "2", "--checkpoint.enable", "--training.mixed_precision_param", "float32"]
    options += ["--lr_scheduler.warmup_steps", "1"]
    end = ["--checkpoint.last_save_in_hf"]
    first = launch(tmp_path / "a", "--training.steps", "2", *options, *end, ranks=2, environment=environment)
    assert first.returncode == 0, first.stdout + first.stderr
    folder = tmp_path / "a" / "checkpoint" / "step-2-hf"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    begin = ["--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path", str(folder)]
    second = launch(tmp_path / "b", "--training.steps", "1", *options, *begin, environment=environment)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "Weights from" in second.stdout
    trained, started = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert started[0][TAG] == pytest.approx(trained[-1][TAG], abs=1e-5)
    assert trained[-1][TAG] < trained[0][TAG] - 0.01


def test_a_folder_of_another_model_is_refused_before_anything_starts(folders, tmp_path):
    begin = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.initial_load_path"]
    done = launch(tmp_path / "run", *begin, str(Path(folders("llama")[0])))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "model.dim is 32 there, 128 in this configuration" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model__n_layers": 3}, "layers.2.attention.wq.weight is missing there, ("),
        ({"model__n_layers": 1}, "there, missing in this configuration"),
        ({"model__dim": 64}, "tok_embeddings.weight is"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_before_anything_starts(changes, said, folders, tmp_path):
    folder = folders("llama")[1]
    snippet, begin = folder / "model.toml", {"checkpoint__initial_load_path": str(folder)}
    check_interchange(configuration(snippet, **begin))
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_interchange(configuration(snippet, **begin, **changes))


def test_a_run_that_goes_on_needs_no_first_weights(folders, tmp_path):
    snippet = folders("llama")[1] / "model.toml"
    run_dir = save_run(configuration(snippet), tmp_path / "run")
    gone = {"checkpoint__initial_load_path": "gone"}
    check_interchange(configuration(snippet, **gone, job__run_dir=str(run_dir)))
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        check_interchange(configuration(snippet, **gone))


def test_a_damaged_checkpoint_is_refused_before_anything_moves(folders, tmp_path, capsys):
    snippet = folders("llama")[1] / "model.toml"
    run_dir = save_run(configuration(snippet), tmp_path / "run")
    config = configuration(snippet, job__run_dir=str(run_dir))
    check_interchange(config)
    held = run_dir / "checkpoint" / "step-1" / "__0_0.distcp"
    held.write_bytes(held.read_bytes()[:100])
    with pytest.raises(ConfigError, match="step-1: __0_0.distcp has 100 bytes of .*damaged"):
        check_interchange(config)
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 2
    assert "__0_0.distcp has 100 bytes of" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
