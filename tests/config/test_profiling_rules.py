"""[profiling]: each wrong value is one sentence that names the key, the value and the fix."""

import pytest

from config.layouts import check_layout_on
from config.load import load, load_file
from config.world import check_world
from tests.config.refusal import refusal

ON = ["--profiling.enable_profiling"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([*ON, "--profiling.profile_freq", "3"], "profiling.profile_freq = 3 (command line) is shorter than a window"),
        (["--profiling.profile_freq", "0"], "must be at least 1"),
        (["--profiling.ranks", "[-1]"], "profiling.ranks = [-1] (command line): expected ranks from 0, each once"),
        (["--profiling.ranks", "[1, 1]"], "each once"),
        (["--profiling.ranks", '["a"]'], "expected a list of integers"),
        (["--profiling.save_traces_folder", "/tmp"], 'expected a folder inside the run directory, such as "profile_'),
        (["--profiling.save_traces_folder", "../x"], "expected a folder inside the run directory"),
        (["--profiling.save_traces_folder", "attempts"], "expected a folder inside the run directory"),
        (["--profiling.save_traces_folder", "tb"], "is also metrics.save_tb_folder. Choose another folder."),
        (["--profiling.save_memory_snapshot_folder", "profile_traces"], "is also profiling.save_traces_folder"),
        (["--profiling.enable_profilin"], "did you mean '--profiling.enable_profiling'"),
    ],
)
def test_wrong_values(tmp_path, options, message):
    assert message in refusal(tmp_path, load, options)


def test_a_window_may_fill_its_whole_period():
    config = load([*ON, "--profiling.profile_freq", "4"]).config.profiling
    assert config.profiler_warmup + config.profiler_active == config.profile_freq


def test_a_rank_that_does_not_exist_is_refused_where_it_would_record(tmp_path):
    assert "there is no rank 2 among 2 (0 to 1)" in refusal(
        tmp_path, check_world, load([*ON, "--profiling.ranks", "[0, 2]"]).config, 2
    )
    check_world(load(["--profiling.ranks", "[0, 2]"]).config, 2)
    check_world(load([*ON, "--profiling.ranks", "[]"]).config, 2)


def test_memory_snapshots_need_a_gpu(tmp_path):
    config = load(["--profiling.enable_memory_snapshot"]).config
    check_layout_on(config, "cuda", "2.11.0")
    assert "profiling.enable_memory_snapshot = true, and this machine has no GPU" in refusal(
        tmp_path, check_layout_on, config, "cpu", "2.13.0"
    )


def test_what_may_surprise_is_noted(tmp_path):
    text = "[profiling]\nenable_profiling = true\nprofile_freq = 100\n[training]\nsteps = 20\n"
    (tmp_path / "a.toml").write_text(text)
    assert any("profile_freq = 100 is beyond" in note for note in load_file(tmp_path / "a.toml").notes)
    notes = load(["--profiling.enable_memory_snapshot"]).notes
    assert any("none counts for throughput" in note for note in notes)
