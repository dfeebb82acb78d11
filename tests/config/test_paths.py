"""What a run will read must exist before anything starts; a dry run and load_file do not look."""

from pathlib import Path

from config.load import load, load_file
from config.paths import missing_files
from tests.config.refusal import refusal


def text(path) -> list[str]:
    return ["--data.corpus", "text", "--data.path", str(path)]


def test_data_path_missing_or_empty(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "full.txt").write_text("words")
    message = refusal(tmp_path, load, text(tmp_path / "none"))
    assert message == f'data.path = "{tmp_path}/none" (command line): no such file or folder'
    assert f"(relative to {Path.cwd()})" in refusal(tmp_path, load, text("none"))
    assert "the folder is empty" in refusal(tmp_path, load, text(tmp_path / "folder"))
    assert "the file is empty" in refusal(tmp_path, load, text(tmp_path / "empty.txt"))
    assert load(text(tmp_path / "full.txt")).config.data.path


def test_paths_inside_a_mixture(tmp_path):
    sources = f'[{{ corpus = "text", path = "{tmp_path}/none", weight = 1 }}, {{ corpus = "python", weight = 2 }}]'
    message = refusal(tmp_path, load, ["--data.corpus", "mixture", "--data.sources", sources])
    assert message.startswith(f'data.sources, table 1: path = "{tmp_path}/none": no such file')


def test_further_roots_and_local_data_sets(tmp_path):
    assert "no such folder" in refusal(tmp_path, load, ["--data.roots", "site-packages", str(tmp_path / "none")])
    local = ["--data.corpus", "hf", "--data.name", str(tmp_path / "none")]
    assert "data.name" in refusal(tmp_path, load, local)
    assert load(["--data.corpus", "hf", "--data.name", "allenai/c4"]).config.data.name == "allenai/c4"


def test_tokenizer_file(tmp_path):
    words = ["--model.hf_assets_path", str(tmp_path / "assets")]
    assert "no such folder" in refusal(tmp_path, load, words)
    (tmp_path / "assets").mkdir()
    assert "holds no tokenizer.json" in refusal(tmp_path, load, words)
    other = load([*words, "--data.tokenizer", "bpe"])
    assert other.notes == ['model.hf_assets_path (command line) has no effect while data.tokenizer = "bpe"']
    (tmp_path / "assets" / "tokenizer.json").write_text("{}")
    assert load(words).config.model.hf_assets_path


def test_a_file_where_a_run_directory_should_be(tmp_path):
    (tmp_path / "taken").write_text("")
    assert "job.run_dir" in refusal(tmp_path, load, ["--job.run_dir", str(tmp_path / "taken")])
    assert "job.dump_folder" in refusal(tmp_path, load, ["--job.dump_folder", str(tmp_path / "taken")])


def test_a_dry_run_and_load_file_do_not_look(tmp_path):
    resolved = load([*text(tmp_path / "none"), "--job.dry_run"])
    assert len(list(missing_files(resolved.config, resolved.origins))) == 1
    (tmp_path / "a.toml").write_text('[data]\ncorpus = "text"\npath = "none"\n')
    assert load_file(tmp_path / "a.toml").config.data.path == "none"
