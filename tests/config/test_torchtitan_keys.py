"""Files of torchtitan 0.2.2 load, or each key that cannot be says why. keys.txt lists every key of its schema."""

from pathlib import Path

import pytest

from config import torchtitan_keys
from config.keys import all_keys
from config.load import load_file
from tests.config.refusal import refusal

FILES = Path(__file__).parent / "torchtitan"


def test_every_key_of_torchtitan_is_in_the_schema_or_known_here_and_in_one_place_only():
    theirs = set((FILES / "keys.txt").read_text().split())
    known = torchtitan_keys.names()
    assert len(theirs) == 149 and len(known) == len(set(known))
    assert theirs - all_keys().keys() == set(known), "each of torchtitan's keys is the schema's or is in one table"


def test_what_follows_follows_a_key_that_is_judged():
    assert set(torchtitan_keys.FOLLOWS.values()) <= set(torchtitan_keys.REFUSED) | all_keys().keys()


def test_8b_loads():
    resolved = load_file(FILES / "llama3_8b.toml")
    config = resolved.config
    assert (config.model.flavor, config.training.seq_len, config.optimizer.lr) == ("8B", 8192, 3e-4)
    assert (config.profiling.enable_profiling, config.profiling.profile_freq) == (True, 100)
    assert (config.data.corpus, config.data.name, config.data.subset) == ("hf", "allenai/c4", "en")
    assert resolved.origins["data.name"] == "llama3_8b.toml, from training.dataset"
    (note,) = [n for n in resolved.notes if "torchtitan" in n]
    assert "checkpoint.last_save_model_only" in note and "training.data" not in note
    assert (config.quantize.linear.float8.filter_fqns, config.model.converters) == (["output"], [])


def test_debug_loads_with_another_corpus():
    config = load_file(FILES / "llama3_debug.toml", {"training.dataset": "python"}).config
    assert (config.model.flavor, config.data.corpus, config.lr_scheduler.decay_ratio) == ("debugmodel", "python", 0.8)
    assert load_file(FILES / "llama3_debug.toml", {"data.corpus": "python"}).config.data.corpus == "python"


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("llama3_debug", {}, ['training.dataset = "c4_test": torchtitan\'s 2,000 test documents are not part']),
    ],
)
def test_each_refused_key_of_the_others_says_why_and_nothing_else_is_refused(name, overrides, expected):
    message = refusal(FILES, load_file, FILES / f"{name}.toml", overrides)
    lines = message.splitlines()
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert line.startswith(f"{name}.toml: ") and part in line


def test_a_converter_that_torchtitan_itself_does_not_know_is_named():
    message = refusal(FILES, load_file, FILES / "llama3_405b.toml", {"parallelism.tensor_parallel_degree": 1})
    assert 'there is no converter "float8"' in message and "known: quantize.linear.float8" in message


@pytest.mark.parametrize("name", ["llama3_70b", "llama3_405b"])
def test_the_others_load_without_what_was_refused(name):
    off = {"model.converters": []}
    config = load_file(FILES / f"{name}.toml", off).config
    assert config.activation_checkpoint.mode == "full"
    assert config.parallelism.tensor_parallel_degree == 8


def test_context_parallel_keys_say_method_and_layout(tmp_path):
    (tmp_path / "a.toml").write_text("")
    rotate, balancer = (f"parallelism.context_parallel_{name}" for name in ("rotate_method", "load_balancer"))
    for asked, method in {"allgather": "allgather", "alltoall": "ring"}.items():
        section = load_file(tmp_path / "a.toml", {rotate: asked, balancer: "headtail"}).config.parallelism
        assert (section.context_parallel_method, section.context_parallel_layout) == (method, "zigzag")
    resolved = load_file(tmp_path / "a.toml", {balancer: "ptrr"})
    assert any(balancer in note for note in resolved.notes), "harmless without context parallelism"
    two = {"parallelism.context_parallel_degree": 2, balancer: "ptrr"}
    message = refusal(tmp_path, load_file, tmp_path / "a.toml", two)
    assert f'{balancer} = "ptrr": there is no such option here; parallelism.context_parallel_layout' in message


@pytest.mark.parametrize("full", sorted(torchtitan_keys.REFUSED))
def test_harmless_values_load_and_others_are_refused_by_name(tmp_path, full):
    (tmp_path / "a.toml").write_text("")
    harmless, reason = torchtitan_keys.REFUSED[full]
    for value in harmless:
        notes = load_file(tmp_path / "a.toml", {full: value}).notes
        assert any(full in note for note in notes)
    other = {"validation.enable": True, full: "something else"}
    message = refusal(tmp_path, load_file, tmp_path / "a.toml", other)
    assert message == f'command line: {full} = "something else": {reason}'


@pytest.mark.parametrize(("full", "parent"), sorted(torchtitan_keys.FOLLOWS.items()))
def test_what_follows_loads_with_any_value(tmp_path, full, parent):
    (tmp_path / "a.toml").write_text("")
    assert any(full in note for note in load_file(tmp_path / "a.toml", {full: 12345}).notes)


def test_a_number_is_not_a_truth_value(tmp_path):
    (tmp_path / "a.toml").write_text("[fault_tolerance]\nenable = 0\n[training.dataloader]\nnum_workers = false\n")
    assert len(refusal(tmp_path, load_file, tmp_path / "a.toml").splitlines()) == 2


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('[training]\ndataset = "c4"', {"corpus": "hf", "name": "allenai/c4", "subset": "en", "split": "train"}),
        ('[training]\ndataset = "c4"\ndataset_path = "/x"', {"corpus": "hf", "name": "/x", "subset": "en"}),
        ('[training]\ndataset = "c4_test"\ndataset_path = "/x"', {"corpus": "hf", "name": "/x", "subset": ""}),
        ('[training]\ndataset = "c4_validation"', {"split": "validation"}),
        ('[training]\ndataset = "python"', {"corpus": "python"}),
        ('[training]\ndataset = "text"\ndataset_path = "/x"', {"corpus": "text", "path": "/x"}),
        ('[training]\ndataset = "c4"\n[data]\ncorpus = "hf"\nname = "allenai/c4"', {"name": "allenai/c4"}),
    ],
)
def test_data_sets_are_translated(tmp_path, text, values):
    (tmp_path / "a.toml").write_text(text)
    data = vars(load_file(tmp_path / "a.toml").config.data)
    assert {name: data[name] for name in values} == values


def test_the_path_may_come_from_a_higher_layer_than_the_data_set(tmp_path):
    (tmp_path / "a.toml").write_text('[training]\ndataset = "c4"\n')
    data = load_file(tmp_path / "a.toml", {"training.dataset_path": "/x"}).config.data
    assert (data.name, data.subset) == ("/x", "en")


def test_tokenizer_path_is_the_assets_folder(tmp_path):
    (tmp_path / "a.toml").write_text('[model]\ntokenizer_path = "/assets"\n')
    assert load_file(tmp_path / "a.toml").config.model.hf_assets_path == "/assets"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[training]\ndataset = "c4"\n[data]\ncorpus = "python"',
            'training.dataset = "c4" means data.corpus = "hf", but data.corpus = "python" is set as well. Remove one',
        ),
        ('[model]\ntokenizer_path = "/a"\nhf_assets_path = "/b"', 'means model.hf_assets_path = "/a", but'),
        ('[training]\ndataset = "pyton"', 'training.dataset = "pyton": unknown data set - did you mean "python"?'),
        ('[training]\ndataset = "python"\ndataset_path = "/x"', 'the corpus "python" takes no path'),
        ('[model]\nflavor = "8B_flex"', 'Use "8B" with data.document_mask = true'),
        ("[validation]\nenable = true\nseq_len = 64", "validation.seq_len = 64: validation uses training.seq_len"),
        ('[validation]\nenable = true\ndataset = "c4_validation"', "validation reads held-out documents"),
        ('[activation_checkpoint]\nmode = "memory_budget"', "it is the compiler that chooses what to recompute"),
    ],
)
def test_conflicts_and_what_has_no_counterpart(tmp_path, text, message):
    (tmp_path / "a.toml").write_text(text)
    assert message in refusal(tmp_path, load_file, tmp_path / "a.toml")


def test_an_equal_validation_length_loads(tmp_path):
    (tmp_path / "a.toml").write_text("[validation]\nenable = true\nseq_len = 64\n[training]\nseq_len = 64\n")
    assert load_file(tmp_path / "a.toml").config.training.seq_len == 64
