"""What is sent to a colleague: complete enough to compare again, without checkpoints, never over an earlier file."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from ablation.compare import compare_directories
from ablation.pack import main, pack
from config.errors import ConfigError
from tests.ablation.synthetic import three_arms, write_ablation

KERNELS = "profile_traces/iteration_10/rank0_kernels.txt"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("ablation.report.draw_all", lambda result: {})  # seconds that this is not about
    folder = write_ablation(tmp_path / "outputs", three_arms(), question={"aa": False})
    run = folder / "wd_0.1" / "seed1-1gpu"
    for name in (
        "checkpoint/step-60/__0_0.distcp",
        "checkpoint/step-60/.metadata",
        "profile_traces/iteration_10/rank0_trace.json.gz",
        "model.safetensors",
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"0" * 1000)
    (run / KERNELS).write_text("kernels")
    (run / "profile_traces/iteration_10/rank0_kernels.txt").write_text("kernels")
    (run / "dirty.patch").write_text("+1\n")
    (run / "elsewhere").symlink_to("/etc/hostname")
    return folder


def test_the_archive_compares_again_to_the_same_numbers(folder, tmp_path, capsys):
    assert main([str(folder), "--to", str(tmp_path / "out")]) == 0
    assert "without 5 checkpoints, traces and locks" in capsys.readouterr().out
    page, archive = tmp_path / "out" / "weight_decay-report.html", tmp_path / "out" / "weight_decay.tar.gz"
    assert page.read_text() == (folder / "report" / "report.html").read_text()
    with tarfile.open(archive) as tar:
        names = tar.getnames()
        assert {(m.uid, m.uname) for m in tar.getmembers()} == {(0, "")}
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer ask for it
        tar.extractall(tmp_path / "there")
    assert not [
        name
        for name in names
        if "checkpoint" in name or "trace.json" in name or "safetensors" in name or "elsewhere" in name
    ]
    for needed in ("config.toml", "run.json", "environment.json", "metrics.jsonl", "DONE", "dirty.patch", KERNELS):
        assert f"weight_decay/wd_0.1/seed1-1gpu/{needed}" in names
    assert "weight_decay/report/report.json" in names
    here, _ = compare_directories([folder])
    there, _ = compare_directories([tmp_path / "there" / "weight_decay"])
    assert there["comparisons"] == here["comparisons"]


def test_nothing_is_overwritten_silently(folder, tmp_path, capsys):
    page, archive, _ = pack(folder)
    assert page == Path(page) and archive.exists()
    archive.write_bytes(b"precious")
    page.unlink()
    with pytest.raises(ConfigError, match="there already"):
        pack(folder)
    assert archive.read_bytes() == b"precious" and not page.exists()
    assert main([str(folder)]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([str(folder), "--overwrite"]) == 0 and tarfile.is_tarfile(archive)


def test_a_folder_without_runs(tmp_path):
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2
