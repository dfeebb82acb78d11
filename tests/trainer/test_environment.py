"""The record of a run's environment, and that its commit and patch give the source back."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer import environment
from trainer.environment import describe_environment, links_between, read_clocks


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "source with space"
    root.mkdir()
    git(root, "init", "-q")
    (root / "a.py").write_text("one = 1\n")
    (root / "gone.py").write_text("removed = True\n")
    (root / ".gitignore").write_text("outputs/\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def test_clean_tree(repository: Path) -> None:
    record, patch = describe_environment(repository, deterministic=True)
    assert record["git_commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert record["git_dirty"] is False and patch == b""
    assert record["deterministic"] is True


def test_commit_and_patch_give_the_source_back(repository: Path, tmp_path: Path) -> None:
    (repository / "a.py").write_text("one = 2\n")
    git(repository, "add", "a.py")  # staged
    (repository / "a.py").write_text("one = 3\n")  # and changed again
    (repository / "gone.py").unlink()
    (repository / "room").mkdir()
    (repository / "room" / "new file.py").write_text("new = 1")  # no newline at the end
    (repository / "* [a].py").write_bytes(b"odd = '\xff'\r\n")  # a name git could match with, and not UTF-8
    (repository / "outputs").mkdir()
    (repository / "outputs" / "ignored.txt").write_text("x\n")
    (repository / "weights.bin").write_bytes(b"\0" * 10)
    (repository / "large.txt").write_text("x" * 1_000_001)
    before = git(repository, "status", "--porcelain")

    record, patch = describe_environment(repository / "room", deterministic=False)  # from a folder inside
    assert record["git_dirty"] is True
    assert git(repository, "status", "--porcelain") == before, "the index is as it was"
    assert record["git_not_in_patch"] == ["large.txt", "weights.bin"]
    assert b"weights.bin" not in patch and b"large.txt" not in patch and b"ignored" not in patch

    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    git(clone, "checkout", "-q", record["git_commit"])
    (tmp_path / "dirty.patch").write_bytes(patch)
    git(clone, "apply", "--whitespace=nowarn", str(tmp_path / "dirty.patch"))
    assert (clone / "a.py").read_text() == "one = 3\n"
    assert not (clone / "gone.py").exists()
    assert (clone / "room" / "new file.py").read_text() == "new = 1"
    assert (clone / "* [a].py").read_bytes() == b"odd = '\xff'\r\n"


def test_a_binary_untracked_file_makes_the_tree_dirty(repository: Path) -> None:
    (repository / "weights.bin").write_bytes(b"\0")
    record, patch = describe_environment(repository, deterministic=False)
    assert record["git_dirty"] is True and patch == b""


def test_outside_git_and_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    plain = tmp_path / "plain"
    plain.mkdir()
    record, patch = describe_environment(plain, deterministic=False)
    assert record["git_commit"] is None and record["git_dirty"] is None and patch == b""
    monkeypatch.setenv("PATH", str(plain))
    record, patch = describe_environment(repository, deterministic=False)
    assert record["git_commit"] is None and patch == b""


def test_fields_and_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    changing = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "TORCHINDUCTOR_FREEZING", "OMP_NUM_THREADS", "GLOO_X")
    for name in changing:  # a number that may change what is measured, on one side of a comparison
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCH_API_KEY", "not recorded")
    monkeypatch.setenv("HOME_ADDRESS", "not recorded either")
    record, _ = describe_environment(tmp_path, deterministic=False)
    assert json.loads(json.dumps(record)) == record
    contract = """hostname_hash gpu_name gpu_count driver clocks python torch cuda nccl triton torchtitan liger_kernel
        flash_attn cpu cores ram_gib os env git_commit git_dirty deterministic matmul_precision"""
    assert set(contract.split()) <= set(record)
    assert record["env"]["NCCL_DEBUG"] == "WARN" and {record["env"][name] for name in changing} == {"1"}
    assert "not recorded" not in json.dumps(record)
    assert record["torchtitan"] == "0.3.0"
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["cores"] >= 1 and record["ram_gib"] > 0 and record["cpu"]
    assert os.uname().nodename not in record.values()


def test_a_missing_package_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no_such_package_at_all"))
    record, _ = describe_environment(tmp_path, deterministic=False)
    assert record["torch"] and record["no_such_package_at_all"] is None


@pytest.mark.gpu
def test_gpu_fields(tmp_path: Path) -> None:
    record, _ = describe_environment(tmp_path, deterministic=False)
    assert record["gpu_name"] and record["gpu_count"] >= 1 and record["cuda"] and record["nccl"]
    assert record["driver"] and record["clocks"]["sm_mhz"] > 0 and record["clocks"]["power_limit_w"] > 0


def test_links_between_gpus() -> None:
    """The table as nvidia-smi 580 prints it, its header underlined."""
    head = "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
    rows = "GPU0\t X \tNV18\tSYS\tPIX\t0-15\nGPU1\tNV18\t X \tNV18\tSYS\t0-15\nGPU2\tSYS\tNV18\t X \tSYS\t0-15\n"
    legend = "NIC0\tPIX\tSYS\tSYS\t X \t\n\nLegend:\n\n  X    = Self\n"
    assert links_between(head + rows + legend) == "2 x NV18, 1 x SYS"
    assert links_between("\t\x1b[4mGPU0\tCPU Affinity\x1b[0m\nGPU0\t X \t0-15\n") is None
    assert links_between("") is None


def test_clocks_are_those_of_this_card_and_a_power_cap_is_no_throttling(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def nvidia_smi(*arguments: str) -> str:
        asked.append(arguments)
        other = "GPU-aa, 345, 1980, 2619, 80.0, 700.0, 30, Active, Active, Not Active, Not Active, Not Active\n"
        return other + "GPU-bb, 1755, 1980, [N/A], 698.2, 700.0, 61, Not Active, Not Active, Not Active, Active, Active"

    monkeypatch.setattr(environment, "_nvidia_smi", nvidia_smi)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid="bb"))
    assert read_clocks() == {
        "sm_mhz": 1755.0, "max_sm_mhz": 1980.0, "memory_mhz": None, "power_w": 698.2, "power_limit_w": 700.0,
        "temperature_c": 61.0, "throttled": ["sw_thermal_slowdown"], "power_capped": True,
        "throttled_total_s": None,
    }  # fmt: skip
    assert asked[0][0].startswith("--query-gpu=uuid,clocks.sm,") and asked[0][0].count(",") == 11
    counted = "GPU-aa, 9, 9, 9\nGPU-bb, 0, 0, 2500000 us\n"
    monkeypatch.setattr(environment, "_nvidia_smi", lambda *a: counted if "counters" in a[0] else nvidia_smi(*a))
    told = read_clocks()
    assert told is not None and told["throttled_total_s"] == {
        "hw_thermal_slowdown": 0.0, "hw_power_brake_slowdown": 0.0, "sw_thermal_slowdown": 2.5,
    }  # fmt: skip
    monkeypatch.setattr(environment, "_nvidia_smi", lambda *arguments: "")
    assert read_clocks() is None
