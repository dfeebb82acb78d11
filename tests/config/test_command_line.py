"""The command line: spellings that work, and the message for each that does not."""

import pytest

from config.command_line import help_text, parse
from config.keys import all_keys, help_lines
from config.load import load
from tests.config.refusal import refusal


@pytest.mark.parametrize(
    ("words", "full", "value"),
    [
        (["--training.steps", "50"], "training.steps", 50),
        (["--training.steps=50"], "training.steps", 50),
        (["--training.global-batch-size", "-1"], "training.global_batch_size", -1),
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--model.dim", "256"], "model.dim", 256),
        (["--model.qk_norm"], "model.qk_norm", True),
        (["--compile.enable"], "compile.enable", True),
        (["--compile.enable", "true"], "compile.enable", True),
        (["--compile.enable", "False"], "compile.enable", False),
        (["--compile.enable=false"], "compile.enable", False),
        (["--no-compile.enable"], "compile.enable", False),
        (["--compile.no_enable"], "compile.enable", False),
        (["--compile.components", "model", "loss"], "compile.components", ["model", "loss"]),
        (["--compile.components", "model,loss"], "compile.components", ["model", "loss"]),
        (["--compile.components", "[]"], "compile.components", []),
        (["--data.roots", '["a b", "c"]'], "data.roots", ["a b", "c"]),
        (["--job.description", "two words"], "job.description", "two words"),
        (["--training.steps", "5", "--training.steps", "6"], "training.steps", 6),
        (["--model.converters", "[]"], "model.converters", []),
        (
            ["--data.sources", '[{ corpus = "python", weight = 1 }]'],
            "data.sources",
            [{"corpus": "python", "weight": 1}],
        ),
    ],
)
def test_spellings(words, full, value):
    assert parse(words).leaves == {full: value}


def test_a_switch_does_not_swallow_the_next_option():
    assert parse(["--compile.enable", "--training.steps", "5"]).leaves == {"compile.enable": True, "training.steps": 5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.stpes", "5"], "command line: --training.stpes: unknown key - did you mean '--training.steps'?"),
        (["--trainig.steps", "5"], "--trainig.steps: unknown section [trainig] - did you mean '--training.steps'?"),
        (["--steps", "5"], "command line: --steps: unknown key - did you mean '--training.steps'?"),
        (["--compile", "true"], "--compile: a section, not a key; its keys are enable, components, backend"),
        (["--training.lr", "5"], "did you mean '--optimizer.lr'?"),
        (["--training.steps", "x"], 'command line: --training.steps = "x": expected an integer'),
        (["--training.steps"], "command line: --training.steps: needs a value: an integer"),
        (["--training.steps", "0"], "--training.steps = 0: must be at least 1"),
        (["--compile.enable=maybe"], '--compile.enable = "maybe": expected true or false'),
        (["--attention.backend", "sdap"], 'did you mean "sdpa"?'),
        (["--compile.components", "modle"], 'did you mean "model"?'),
        (["train.toml"], 'command line: "train.toml": not an option'),
        (["--checkpoint.enable", "maybe"], '--checkpoint.enable = "maybe": expected true or false'),
        (["--no-compile.enable=true"], "--no_compile.enable takes no value; say --compile.enable false"),
        (["--ablation.arn", "x"], "belongs in the TOML file"),
        (["--ablation.arm"], "--ablation.arm: needs a value"),
        (["--job.config_file"], "--job.config_file: needs a value"),
        (["--job.config_fil", "a"], "did you mean '--job.config_file'?"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    assert message in refusal(tmp_path, load, words)


def test_every_mistake_is_reported_at_once(tmp_path):
    message = refusal(tmp_path, parse, ["--training.stpes", "5", "--optimizer.lr", "fast"])
    assert len(message.splitlines()) == 2


def test_help_names_every_key_with_its_docstring_and_exits_with_0(capsys):
    with pytest.raises(SystemExit) as caught:
        load(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for full in all_keys().keys() - {"job.config_file"}:
        assert f"--{full}\n" in text
        assert help_lines()[full] in text
    assert text.strip() == help_text()
