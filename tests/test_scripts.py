"""The launcher and the set-up script: what a user's mistake gives, and that any directory and any path will do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ablation_train
from ablation_train import Launch, command, launch_from, next_commands, with_config_file
from config.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
LAUNCH_VARIABLES = ("NGPU", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOG_RANK", "CONFIG_FILE")


def run(line: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user with this Python active would, without the launch variables of the test's own caller."""
    environment = {k: v for k, v in os.environ.items() if k not in (*LAUNCH_VARIABLES, "WORLD_SIZE", "PYTHONPATH")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(line, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a user would have cloned, in a path with spaces."""
    copy = tmp_path_factory.mktemp("with space") / "a check out"
    unwanted = shutil.ignore_patterns(".*", "outputs", "__pycache__", "*.egg-info", "tests")
    shutil.copytree(ROOT, copy, ignore=unwanted)
    return copy


@pytest.mark.parametrize(
    "variables, arguments, said",
    [
        ({"NGPU": "abc"}, [], "NGPU = 'abc'"),
        ({"NGPU": "0"}, [], "1 or more"),
        ({"NGPU": "-1"}, [], "NGPU = '-1'"),
        ({"LOG_RANK": "1"}, [], "each 0 to 0 (NGPU = 1)"),
        ({"LOG_RANK": "0,,1", "NGPU": "2"}, [], "LOG_RANK = '0,,1'"),
        ({"NNODES": "2"}, [], "needs NODE_RANK and MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, [], "0 to 1"),
        ({"MASTER_PORT": "65536"}, [], "1 to 65535"),
        ({"CONFIG_FILE": "nowhere.toml"}, [], "CONFIG_FILE = 'nowhere.toml' (environment): no such file"),
        ({"CONFIG_FILE": "train_configs"}, [], "CONFIG_FILE = 'train_configs' (environment): is a folder; give"),
        ({"CONFIG_FILE": "nowhere.toml"}, [], "train_configs/llama_debug.toml"),
        ({"NGPU": "3"}, [], "training.global_batch_size = 16 is not divisible"),
        ({}, ["--job.config_file", "nowhere.toml"], "nowhere.toml"),
        ({}, ["--training.stepz", "5"], "did you mean '--training.steps'"),
        ({}, ["--training.steps", "many"], "training.steps"),
        ({}, ["--parallelism.data_parallel_replicate_degree", "2"], "WORLD_SIZE"),
    ],
)
def test_a_mistake_is_one_message_and_exit_2(
    variables: dict[str, str], arguments: list[str], said: str, tmp_path: Path
) -> None:
    result = run([sys.executable, str(ROOT / "ablation_train.py"), *arguments], tmp_path, **variables)
    assert result.returncode == 2, result.stderr
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == "" and list(tmp_path.iterdir()) == [], "nothing may be created"


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    started: list[list[str]] = []
    monkeypatch.setattr(ablation_train, "_run", lambda line, launch: started.append(line) or 0)
    assert ablation_train.main([]) == 2
    assert "NGPU = 2 but this machine has 1 GPU" in capsys.readouterr().err
    assert started == []
    assert ablation_train.main(["--job.dry_run"]) == 0, "a dry run needs no device"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert ablation_train.main([]) == 0, "without GPUs the ranks are CPU processes"
    assert len(started) == 1


def test_one_rank_needs_no_torchrun_and_hidden_ranks_write_to_files() -> None:
    alone = command(Launch(1, 1, 0, "", 29500, (0,)), ["--training.steps", "5"], "logs")
    assert alone == [sys.executable, str(ROOT / "train.py"), "--training.steps", "5"]
    four = command(Launch(4, 1, 0, "", 29500, (0, 2)), [], "a b")
    assert four[four.index("--redirects") + 1] == "1:3,3:3" and four[four.index("--log-dir") + 1] == "a b"
    assert "--standalone" in four
    two_nodes = command(Launch(8, 2, 1, "node0", 1234, tuple(range(8))), [], "logs")
    assert "--redirects" not in two_nodes and "--standalone" not in two_nodes
    assert (
        two_nodes[two_nodes.index("--node-rank") + 1] == "1"
        and two_nodes[two_nodes.index("--master-addr") + 1] == "node0"
    )


def test_empty_variables_count_as_unset() -> None:
    assert launch_from(dict.fromkeys(LAUNCH_VARIABLES, "")) == Launch(1, 1, 0, "", 29500, (0,))
    with pytest.raises(ConfigError, match="NGPU"):
        launch_from({"NGPU": "1.5"})


def test_an_error_of_a_hidden_rank_is_shown(checkout: Path, tmp_path: Path) -> None:
    """torchrun names the rank that failed; the launcher shows what it said, and returns torchrun's code."""
    broken = tmp_path / "broken checkout"
    shutil.copytree(checkout, broken)
    (broken / "train.py").write_text(
        "import os, sys, time\n"
        "print('rank', os.environ['RANK'])\n"
        "if os.environ['RANK'] == '1':\n    raise RuntimeError('the disk of rank 1 is full')\n"
        "time.sleep(60)\n"
    )
    result = run(["bash", str(broken / "run_llama_train.sh")], tmp_path, NGPU="2")
    assert result.returncode == 1
    assert "RuntimeError: the disk of rank 1 is full" in result.stderr
    assert result.stderr.rstrip().endswith("RuntimeError: the disk of rank 1 is full"), "the error comes last"
    assert "rank 0" in result.stdout and "rank 1" not in result.stdout


def test_a_path_with_spaces_and_another_directory(checkout: Path, tmp_path: Path) -> None:
    variables = {"NGPU": "2", "CONFIG_FILE": "train_configs/llama_debug.toml"}
    result = run(["bash", str(checkout / "run_llama_train.sh"), "--job.dry_run"], tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    assert "llama_debug.toml" in result.stdout
    assert list(tmp_path.iterdir()) == [] and not (checkout / ".venv").exists()


def test_a_relative_config_file_is_first_that_of_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "llama_debug.toml").write_text("[training]\nstepz = 5\n")
    variables = {"CONFIG_FILE": "train_configs/llama_debug.toml"}
    result = run([sys.executable, str(ROOT / "ablation_train.py")], tmp_path, **variables)
    assert result.returncode == 2 and "stepz" in result.stderr


@pytest.mark.parametrize("typed", [["--job.config_file", "{}"], ["--job.config_file={}"], ["--job.config-file", "{}"]])
def test_a_relative_option_is_that_of_the_checkout_where_there_is_no_other(
    typed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [word.format("train_configs/debug_cpu.toml") for word in typed]
    rest = ["--training.steps", "5"]
    found = with_config_file([*rest, *options, *rest], {"CONFIG_FILE": "not read"})
    assert found == [*rest, "--job.config_file", str(ROOT / "train_configs" / "debug_cpu.toml"), *rest]
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "debug_cpu.toml").touch()
    assert with_config_file(options, {}) == options
    assert with_config_file(["--job.config_file"], {}) == ["--job.config_file"]


def test_ctrl_c_during_the_checks_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(environment: object) -> Launch:
        raise KeyboardInterrupt

    monkeypatch.setattr(ablation_train, "launch_from", interrupted)
    assert ablation_train.main([]) == 130


def test_a_package_of_the_same_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other" / "config").mkdir(parents=True)
    (tmp_path / "other" / "config" / "__init__.py").touch()
    code = f"import sys; sys.path.append({str(ROOT)!r}); import ablation_train; sys.exit(ablation_train.main([]))"
    result = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=str(tmp_path / "other"))
    assert result.returncode == 2
    assert f"another package called 'config' hides the one of this checkout: it comes from {tmp_path}" in result.stderr


def test_an_installation_without_its_checkout_is_refused(tmp_path: Path) -> None:
    shutil.copy(ROOT / "ablation_train.py", tmp_path)
    result = run([sys.executable, str(tmp_path / "ablation_train.py")], tmp_path)
    assert result.returncode == 2 and "pip install -e ." in result.stderr


def test_what_to_type_next_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIG_FILE", "my configs/a.toml")
    monkeypatch.delenv("NGPU", raising=False)
    typed = ["--job.run_dir", "outputs/a b", "--debug.seed=2", "--training.steps", "5"]
    curves, again = next_commands("outputs/a b", typed, 2).strip().splitlines()[-2:]
    assert curves.endswith("--logdir 'outputs/a b'")
    assert "CONFIG_FILE='my configs/a.toml' " in again
    assert again.endswith("run_llama_train.sh --training.steps 5 --debug.seed 3"), "a run directory holds one run"


def bare_python(folder: Path) -> Path:
    """A folder for PATH with a Python that has no package, not even pip."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin"


def test_set_up_says_what_it_costs_and_what_failed(checkout: Path, tmp_path: Path) -> None:
    path = f"{bare_python(tmp_path / 'bare')}{os.pathsep}/usr/bin{os.pathsep}/bin"
    target = tmp_path / "new env"
    line = ["bash", str(checkout / "setup_env.sh"), "dev", str(target)]
    result = run(line, tmp_path, PATH=path, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert result.returncode == 1 and result.stdout == ""
    assert "2.4 GB on disk" in result.stderr and str(target) in result.stderr.splitlines()[0]
    assert "No matching distribution" in result.stderr, "pip's own words"
    again = run(line, tmp_path, PATH=path, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert again.returncode == 1, "a half-made environment does not pass for a finished one"


def test_set_up_without_a_python_says_what_is_missing(checkout: Path, tmp_path: Path) -> None:
    for tool in ("dirname", "bash"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    result = run([str(tmp_path / "bash"), str(checkout / "setup_env.sh")], tmp_path, PATH=str(tmp_path))
    assert result.returncode == 2
    assert "no Python 3.11 to 3.14 on PATH" in result.stderr
    assert not (checkout / ".venv").exists()


def test_set_up_uses_the_active_environment(tmp_path: Path) -> None:
    result = run(["bash", str(ROOT / "setup_env.sh")], tmp_path)
    assert result.returncode == 0 and result.stderr == ""
    assert Path(result.stdout.strip()).parent == Path(sys.executable).parent


def test_set_up_rejects_an_old_version(checkout: Path, tmp_path: Path) -> None:
    """An active environment whose torch is too old does not count as having the dependencies."""
    path = bare_python(tmp_path / "old")
    packages = next((tmp_path / "old" / "lib").glob("python*")) / "site-packages"
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name = name.split(";")[0].split(">")[0].split("=")[0].replace("-", "_")
        bounded = {"torch": "2.10.1", "torchtitan": "0.3.0", "datasets": "4.7.0", "liger_kernel": "0.8.5"}
        version = bounded.get(name, "99.0")
        (packages / f"{name}-{version}.dist-info").mkdir()
        (packages / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    shutil.copytree(checkout, tmp_path / "copy")
    line = ["bash", str(tmp_path / "copy" / "setup_env.sh")]
    variables = {"PATH": f"{path}{os.pathsep}/usr/bin{os.pathsep}/bin", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    assert run(line, tmp_path, **variables).returncode == 1, "torch 2.10.1 is below the bound"
    (packages / "torch-2.10.1.dist-info").rename(packages / "torch-2.13.0+cpu.dist-info")
    (packages / "torch-2.13.0+cpu.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.13.0+cpu\n")
    result = run(line, tmp_path, **variables)
    assert result.returncode == 0 and result.stdout.strip() == str(path / "python")


def test_the_lock_file_holds_what_pyproject_allows() -> None:
    """Each dependency is pinned; torch and triton are the pair that the CUDA build of torch asks for."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["dev"], *extras["report"]]:
        name = requirement.split(";")[0].split(">")[0].split("=")[0]
        assert name in pins, f"{name} is not pinned"
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
    assert pins["torchtitan"] == "0.3.0"


def test_what_only_a_rank_would_find_is_found_before_torchrun(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"a line\n\xff\xfe another\n")
    options = ["--data.corpus", "text", "--data.path", "corpus.txt"]
    done = run([str(ROOT / "run_llama_train.sh"), *options], tmp_path, NGPU="2")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("corpus.txt:2: not UTF-8")
    assert "Traceback" not in done.stderr and "torch.distributed" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]


def test_a_taken_run_directory_is_refused_before_torchrun(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    done = run([str(ROOT / "run_llama_train.sh"), "--job.run_dir", "taken"], tmp_path, NGPU="2")
    assert done.returncode == 2
    assert "is not a run directory and not empty" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["notes.txt"]
