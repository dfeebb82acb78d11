"""Reading files: bases, syntax, unknown keys, types, ranges. Each mistake with its message, and nothing created."""

from pathlib import Path

import pytest

from config.load import load_file
from config.toml_file import read
from tests.config.refusal import refusal


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(folder: Path, text: str) -> str:
    path = write(folder, "run.toml", text)
    return refusal(folder, load_file, path).replace(f"{folder}/", "")


def test_missing_file_is_named_with_the_nearest_one(tmp_path):
    write(tmp_path, "llama_debug.toml", "")
    message = refusal(tmp_path, load_file, tmp_path / "llama_debgu.toml")
    assert message == f"{tmp_path}/llama_debgu.toml: no such file - did you mean {tmp_path}/llama_debug.toml?"
    assert refusal(tmp_path, load_file, tmp_path / "nope.toml") == f"{tmp_path}/nope.toml: no such file"
    assert "folder" in refusal(tmp_path, load_file, tmp_path / "none" / "a.toml")
    assert "is a folder" in refusal(tmp_path, load_file, tmp_path)


def test_syntax_error_has_file_line_and_column(tmp_path):
    message = refused(tmp_path, "[training]\nsteps = 5\nseq_len = = 3\n")
    assert message.startswith("run.toml, line 3, column 11: not valid TOML: ")
    assert "line 2" in refused(tmp_path, "[training]\nsteps = 5 6\n")
    (tmp_path / "run.toml").write_bytes(b"[job]\ndescription = '\xff'\n")
    assert "run.toml, line 2: not UTF-8" in refusal(tmp_path, load_file, tmp_path / "run.toml")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf[training]\nsteps = 5\n")
    assert load_file(tmp_path / "run.toml").config.training.steps == 5


def test_the_same_key_twice_is_a_syntax_error(tmp_path):
    assert "run.toml, line 3" in refused(tmp_path, "[training]\nsteps = 5\nsteps = 6\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nstepz = 5", "run.toml: training.stepz: unknown key - did you mean 'steps'?"),
        (
            "[parallelism]\ntensor_paralel_degree = 2",
            "tensor_paralel_degree: unknown key - did you mean 'tensor_parall",
        ),
        ("[training]\nlr = 1.0", "run.toml: training.lr: unknown key - did you mean 'optimizer.lr'?"),
        ("[debug]\nwarp = 9", "unknown key; [debug] has seed, init_seed"),
        ("[trainig]\nsteps = 5", "unknown section [trainig] - did you mean 'training.steps'?"),
        ("[quux]\na = 1", "unknown section [quux]; the sections are job, model"),
        ("steps = 5", "run.toml: steps = 5: a key outside any section - did you mean 'training.steps'?"),
        ("training = 5", "run.toml: training = 5: expected a section, as in [training]"),
        (
            "[training.dataloader]\nworkers = 1",
            "training.dataloader.workers: unknown key - did you mean 'dataloader.num_w",
        ),
        ("[training.steps]\na = 1", "training.steps = { a = 1 }: expected an integer"),
    ],
)
def test_unknown_section_or_key_is_named_with_the_nearest(tmp_path, text, message):
    assert message in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[training]\nsteps = "50"', 'run.toml: training.steps = "50": expected an integer'),
        ("[training]\nsteps = 5.0", "training.steps = 5.0: expected an integer"),
        ("[training]\nsteps = true", "training.steps = true: expected an integer"),
        ("[optimizer]\nlr = true", "optimizer.lr = true: expected a number"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan: expected a finite number"),
        ("[compile]\nenable = 1", "compile.enable = 1: expected true or false"),
        ("[model]\nname = 3", "model.name = 3: expected a string"),
        ("[model]\ndim = 1.5", "model.dim = 1.5: expected an integer"),
        ('[data]\nroots = "a"', 'data.roots = "a": expected a list of strings'),
        ("[data]\nroots = [1]", "data.roots = [1]: expected a list of strings"),
        ("[data]\nsources = [1]", "data.sources = [1]: expected a list of tables"),
        ("[training]\nsteps = 0", "training.steps = 0: must be at least 1"),
        ("[optimizer]\nbeta1 = 1.5", "optimizer.beta1 = 1.5: must be at most 1"),
        ("[optimizer]\nlr = -1", "optimizer.lr = -1: must be at least 0"),
        (
            '[attention]\nbackend = "sdap"',
            'attention.backend = "sdap": expected one of "auto", "sdpa", "sdpa_math", "sdpa_flash",'
            ' "sdpa_cudnn", "flex", "flash2", "flash4" - did you mean "sdpa"?',
        ),
        ('[compile]\ncomponents = ["modle"]', 'expected one of "model", "loss", "optimizer" - did you mean "model"?'),
    ],
)
def test_wrong_type_range_or_choice_says_what_was_expected(tmp_path, text, message):
    assert message in refused(tmp_path, text)


def test_every_mistake_of_a_file_is_reported_at_once(tmp_path):
    message = refused(
        tmp_path, '[training]\nstepz = 1\nseq_len = "a"\n[ablation]\nseed = [1]\n[arms.x]\nmodel.dimm = 1\n'
    )
    assert len(message.splitlines()) == 4
    assert "run.toml: ablation.seed: unknown key - did you mean 'seeds'?" in message
    assert "run.toml [arms.x]: model.dimm: unknown key - did you mean 'dim'?" in message


def test_an_integer_is_a_number_and_becomes_a_float(tmp_path):
    value = load_file(write(tmp_path, "run.toml", "[optimizer]\nlr = 1\n")).config.optimizer.lr
    assert value == 1.0 and isinstance(value, float)


def test_dotted_keys_and_nested_tables_are_the_same(tmp_path):
    plain = load_file(write(tmp_path, "a.toml", "[training]\nsteps = 7\n"))
    dotted = load_file(write(tmp_path, "b.toml", "training.steps = 7\n"))
    assert plain.config.training == dotted.config.training


def test_bases_are_relative_to_the_file_and_overlaid_left_to_right(tmp_path):
    (tmp_path / "deep").mkdir()
    write(tmp_path, "one.toml", "[training]\nsteps = 1\nseq_len = 16\nlocal_batch_size = 2\n")
    write(tmp_path, "two.toml", "[training]\nsteps = 2\nseq_len = 32\n")
    path = write(tmp_path / "deep", "run.toml", 'base = ["../one.toml", "../two.toml"]\n[training]\nsteps = 3\n')
    resolved = load_file(path)
    training = resolved.config.training
    assert (training.steps, training.seq_len, training.local_batch_size) == (3, 32, 2)
    assert [p.name for p in resolved.files] == ["one.toml", "two.toml", "run.toml"]
    assert resolved.origins["training.steps"] == "run.toml"
    assert resolved.origins["training.seq_len"] == "two.toml"
    assert resolved.origins["training.local_batch_size"] == "one.toml"
    assert resolved.origins["training.max_norm"] == "default"
    assert resolved.base_diff == {"training.steps": (2, 3)}


def test_a_base_of_a_base_comes_first_and_one_used_twice_is_not_circular(tmp_path):
    write(tmp_path, "root.toml", "[training]\nsteps = 1\n")
    write(tmp_path, "a.toml", 'base = "root.toml"\n')
    write(tmp_path, "b.toml", 'base = "root.toml"\n[training]\nsteps = 2\n')
    path = write(tmp_path, "c.toml", 'base = ["b.toml", "a.toml"]\n')
    assert load_file(path).config.training.steps == 1, "a.toml, with its own base, overlays b.toml"


def test_missing_or_circular_base_is_named_with_the_chain(tmp_path):
    write(tmp_path, "a.toml", 'base = "b.toml"\n')
    write(tmp_path, "b.toml", 'base = "c.toml"\n')
    missing = refusal(tmp_path, load_file, tmp_path / "a.toml")
    assert missing.replace(f"{tmp_path}/", "").startswith("c.toml: no such file (base: a.toml -> b.toml -> c.toml)")
    write(tmp_path, "c.toml", 'base = "a.toml"\n')
    circular = refusal(tmp_path, load_file, tmp_path / "a.toml").replace(f"{tmp_path}/", "")
    assert circular.startswith("a.toml: base is circular: a.toml -> b.toml -> c.toml -> a.toml")
    assert "base = 3: expected a file name" in refused(tmp_path, "base = 3\n")


def test_an_ablation_cannot_be_a_base(tmp_path):
    write(tmp_path, "question.toml", "[arms.x]\ntraining.steps = 1\n")
    assert "question.toml is an ablation" in refused(tmp_path, 'base = "question.toml"\n')


def test_the_ablation_table_is_checked_and_kept_as_it_is(tmp_path):
    text = (
        '[ablation]\nvariable = ["optimizer.lr", "training.steps"]\ntune = { "optimizer.lr" = [1e-4, 3e-4] }\n'
        'runs_on = { gpus = [2, 8] }\n[ablation.decide]\nstep = 5\n[arms.a]\n"optimizer.lr" = 1e-3\n'
    )
    document = read(write(tmp_path, "run.toml", text))
    assert document.ablation["tune"] == {"optimizer.lr": [1e-4, 3e-4]}
    assert document.ablation["decide"] == {"step": 5}
    assert document.arms == {"a": {"optimizer.lr": 1e-3}}
    assert "ablation.seeds = 3: expected a list of integers" in refused(tmp_path, "[ablation]\nseeds = 3\n")
    assert "ablation.decide.stepp: unknown key" in refused(tmp_path, "[ablation.decide]\nstepp = 3\n")
    assert "ablation.variable = 1: expected a string or a list of strings" in refused(
        tmp_path, "[ablation]\nvariable=1\n"
    )
    assert "arms.x = 1: expected a table" in refused(tmp_path, "[arms]\nx = 1\n")
