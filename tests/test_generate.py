"""generate.py as its user runs it, on runs that were trained for a moment."""

import shutil
from pathlib import Path

import pytest
import torch

import generate
from interchange.export import export_run
from tests.data.generated import generated_texts
from tests.trained_run import train_run


@pytest.fixture
def dense(trained_run) -> Path:
    return trained_run


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    options = ["--moe.capacity", "position", "--moe.balance", "bias_sign"]
    return train_run(tmp_path_factory.mktemp("experts"), "debug_moe_cpu.toml", *options)


@pytest.fixture
def say(capsys):
    """Runs the command on the CPU; (exit code, standard output, standard error)."""

    def run(source: Path, *options: str) -> tuple[int, str, str]:
        code = generate.main([str(source), "--device", "cpu", *options])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_a_run_continues_what_it_was_trained_on(dense, say):
    code, text, said = say(dense, "--prompt", "7: the river ", "--max_new_tokens", "60", "--temperature", "0.5")
    assert code == 0 and text.startswith("7: the river ") and len(text) > 20
    assert f"{dense}/checkpoint/step-40: float32 on cpu" in said and "tokens/s)" in said
    assert set(text) <= set("".join(generated_texts(2000))), "of 257 tokens, forty steps leave those of the corpus"


@pytest.mark.parametrize("source", ["dense", pytest.param("experts", marks=pytest.mark.slow)])
def test_samples_of_several_prompts_with_and_without_the_cache(source, say, request):
    folder = request.getfixturevalue(source)
    options = ["--prompt", "1: the", "22: a small green", "", "--num_samples", "2", "--max_new_tokens", "30"]
    options += ["--temperature", "0.8", "--top_k", "50", "--top_p", "0.95", "--seed", "3"]
    code, text, said = say(folder, *options)
    assert code == 0 and text.count("--- prompt") == 6 and "--- prompt 2, sample 2\n22: a small green" in text
    assert say(folder, *options, "--no_cache")[1] == text
    assert say(folder, *options, "--seed", "4")[1] != text
    assert ('in training moe.capacity was "position"' in said) == (source == "experts")


def test_a_step_may_be_chosen(dense, say):
    options = ["--prompt", "1: the", "--temperature", "1", "--seed", "3", "--max_new_tokens", "60"]
    early, late = say(dense, *options, "--step", "20"), say(dense, *options)
    assert "step-20" in early[2] and early[1] != late[1]


def test_an_export_says_the_same_as_its_run(dense, say, tmp_path):
    export = export_run(dense, tmp_path / "hf")
    options = ["--prompt", "1: the", "a", "--temperature", "0.9", "--max_new_tokens", "30"]
    code, text, said = say(export, *options)
    assert (code, text) == (0, say(dense, *options)[1]) and f"{export}: float32 on cpu" in said


def test_greedy_text_is_that_of_transformers(dense, say, tmp_path):
    transformers = pytest.importorskip("transformers")
    export = export_run(dense, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    ids = tokenizer("1: the river", return_tensors="pt").input_ids
    theirs = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=256)[0]
    text = say(export, "--prompt", "1: the river", "--max_new_tokens", "40", "--temperature", "0")[1]
    assert text.removesuffix("\n") == tokenizer.decode(theirs, skip_special_tokens=True)


def test_a_run_needs_neither_its_corpus_nor_its_cache(dense, say, tmp_path):
    moved = shutil.copytree(dense, tmp_path / "elsewhere")
    options = ["--prompt", "1: the", "--temperature", "0", "--max_new_tokens", "10"]
    assert say(moved, *options)[1] == say(dense, *options)[1]


def test_a_text_longer_than_those_of_training_is_noted(dense, say):
    code, _, said = say(dense, "--prompt", "1: the", "--max_new_tokens", "100", "--temperature", "0")
    assert code == 0 and "Texts may grow to 107 tokens; the run was trained on 64." in said


@pytest.mark.parametrize(
    "options, blamed",
    [
        (["--temperature", "-1"], "--temperature -1.0: must be 0"),
        (["--top_p", "0"], "--top_p 0.0"),
        (["--max_new_tokens", "0"], "--max_new_tokens 0: must be at least 1"),
        (["--num_samples", "0"], "--num_samples 0"),
        (["--seed", "-1"], "--seed -1"),
        (["--step", "30"], "--step 30: "),
        (["--prompt", "x" * 200], "201 tokens (the first stands for the beginning of a text)"),
        (["--prompt", "x" * 100, "--max_new_tokens", "28"], "Set it to at most 27."),
    ],
)
def test_a_mistake_is_one_message(dense, say, options, blamed):
    given = options if "--prompt" in options else [*options, "--prompt", "a"]
    code, text, said = say(dense, *given)
    assert (code, text) == (2, "") and blamed in said and "Traceback" not in said


def test_a_folder_of_neither_kind_is_a_mistake(dense, say, tmp_path):
    assert "no such folder" in say(tmp_path / "nowhere", "--prompt", "a")[2]
    code, _, said = say(tmp_path, "--prompt", "a")
    assert code == 2 and "holds neither run.json nor config.json" in said
    unsaved = shutil.copytree(dense, tmp_path / "unsaved", ignore=shutil.ignore_patterns("step-*"))
    code, _, said = say(unsaved, "--prompt", "a")
    assert code == 2 and "no complete checkpoint" in said
    strange = shutil.copytree(dense, tmp_path / "strange", ignore=shutil.ignore_patterns("tokenizer"))
    code, _, said = say(strange, "--prompt", "a")
    assert code == 2 and "holds no tokenizer.json" in said
    export = export_run(dense, tmp_path / "hf")
    code, _, said = say(export, "--prompt", "a", "--step", "40")
    assert code == 2 and "--step 40" in said and "Hugging Face folder" in said


def test_an_option_that_is_not_there(dense, capsys):
    with pytest.raises(SystemExit) as stopped:
        generate.main([str(dense), "--prompt", "a", "--temp", "1"])
    assert stopped.value.code == 2 and "--temp" in capsys.readouterr().err
