"""Where a run happened: machine, versions, settings and source, as far as they can change a number.

Versions are read from package metadata, so recording one imports nothing. Whatever cannot be found is None.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "triton",
    "torchtitan",
    "liger_kernel",
    "flash_attn",
    "flash_attn_4",
    "quack_kernels",
    "torchao",
    "datasets",
    "tokenizers",
    "safetensors",
    "tensorboard",
    "numpy",
)
ENVIRONMENT_PREFIXES = ("NCCL_", "CUDA_", "CUBLAS_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_", "OMP_", "GLOO_")
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY")
LARGEST_UNTRACKED_BYTES = 1_000_000

# What nvidia-smi calls a value -> our name. Numbers; a card that does not support one says "[N/A]".
_CLOCKS = {
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
}
# Reasons for a lower clock that make a rate worthless. The power cap is none: under full load a card lives on it.
_THROTTLE = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
_POWER_CAP = "sw_power_cap"
_COUNTED = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""Those whose time the driver adds up; drivers before 590 or so do not say."""


def describe_environment(root: Path, *, deterministic: bool) -> tuple[dict[str, Any], bytes]:
    """The content of environment.json, and the patch that turns the commit in it into the source at ``root``.

    The patch is empty for a clean tree and outside git. The host's name is hashed: enough to tell machines apart.
    """
    source, patch = _source(root)
    environment: dict[str, Any] = {
        "hostname_hash": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:16],
        **_gpu(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "ram_gib": _ram_gib(),
        "os": platform.platform(),
        "env": _variables(),
        **source,
        "deterministic": deterministic,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    return environment, patch


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _variables() -> dict[str, str]:
    """Settings of the libraries that move tensors. Names that look like a secret are left out."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(ENVIRONMENT_PREFIXES) and not any(word in name for word in SECRET_WORDS)
    }


def _gpu() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "gpu_name": torch.cuda.get_device_name() if cuda else None,
        "gpu_count": torch.cuda.device_count() if cuda else 0,
        "driver": _smi("driver_version")[0],
        "gpu_topology": links_between(_nvidia_smi("topo", "-m")),
        "clocks": read_clocks(),
    }


def read_clocks() -> dict[str, Any] | None:
    """Clocks (MHz), power (W), temperature (C) and limits of this process's GPU now; None without one or nvidia-smi.

    ``throttled`` lists the reasons for which it runs slower than it should, ``power_capped`` says whether its power
    limit slows it. ``throttled_total_s`` is the time each reason held since the driver was loaded, None where the
    driver does not tell: the difference between two readings is that of a run.
    """
    reasons = [f"clocks_throttle_reasons.{reason}" for reason in (*_THROTTLE, _POWER_CAP)]
    cells = _smi(*_CLOCKS, *reasons)
    if cells[0] is None:
        return None
    active = dict(zip((*_THROTTLE, _POWER_CAP), cells[len(_CLOCKS) :], strict=True))
    return {
        **{name: _number(cell) for name, cell in zip(_CLOCKS.values(), cells, strict=False)},
        "throttled": [reason for reason in _THROTTLE if active[reason] == "Active"],
        "power_capped": active[_POWER_CAP] == "Active",
        "throttled_total_s": _throttled_seconds(),
    }


def _throttled_seconds() -> dict[str, float] | None:
    """In a query of its own: a driver that does not know one field refuses the whole query."""
    cells = _smi(*(f"clocks_event_reasons_counters.{reason}" for reason in _COUNTED))
    microseconds = [None if cell is None else _number(cell.removesuffix(" us")) for cell in cells]
    return {r: us / 1e6 for r, us in zip(_COUNTED, microseconds, strict=True) if us is not None} or None


def _smi(*fields: str) -> list[Any]:
    """What nvidia-smi says of this process's GPU, a text a field; a None a field without a GPU or nvidia-smi."""
    answer = _nvidia_smi(f"--query-gpu={','.join(('uuid', *fields))}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    rows = [row for row in rows if len(row) == len(fields) + 1]
    if not rows:
        return [None] * len(fields)
    # nvidia-smi lists every card of the host; CUDA_VISIBLE_DEVICES may show this process another order.
    uuid = f"GPU-{getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), 'uuid', '')}"
    return next((row for row in rows if row[0] == uuid), rows[0])[1:]


def _nvidia_smi(*arguments: str) -> str:
    if not torch.cuda.is_available() or not shutil.which("nvidia-smi"):
        return ""
    return (_run("nvidia-smi", *arguments, given=b"") or b"").decode(errors="replace")


def links_between(table: str) -> str | None:
    """The kinds of links between the GPUs of a host, as in "28 x NV18", from the table of ``nvidia-smi topo -m``.

    None with fewer than two GPUs.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in table.splitlines()]
    rows = [[cell.strip() for cell in line[1:]] for line in lines if re.fullmatch(r"GPU\d+", line[0].strip())]
    kinds = Counter(row[column] for number, row in enumerate(rows) for column in range(number))
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common()) or None


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _ram_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3, 1)
    except (ValueError, OSError):
        return None


def _source(root: Path) -> tuple[dict[str, Any], bytes]:
    """The commit at ``root``, whether the tree differs from it, and the patch that says how."""
    commit, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=all")
    if commit is None or status is None:
        return {"git_commit": None, "git_dirty": None, "git_not_in_patch": []}, b""
    patch, left_out = _patch(root)
    return {"git_commit": commit.strip(), "git_dirty": status != "", "git_not_in_patch": left_out}, patch


def _patch(root: Path) -> tuple[bytes, list[str]]:
    """``git diff HEAD`` with untracked text files as new ones, and the names of other untracked files.

    The repository's own index is only read.
    """
    top = Path((_git(root, "rev-parse", "--show-toplevel") or str(root)).rstrip("\n"))
    listed = (_git(top, "ls-files", "--others", "--exclude-standard", "-z") or "").split("\0")
    untracked = [name for name in listed if name]
    text = [name for name in untracked if _is_small_text(top / name)]
    index = Path((_git(top, "rev-parse", "--absolute-git-dir") or "").rstrip("\n")) / "index"
    with tempfile.TemporaryDirectory() as folder:
        # A copy of the index, in which the untracked files are announced: git then writes their part of the patch too.
        copy = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        if index.is_file():
            shutil.copyfile(index, copy["GIT_INDEX_FILE"])
        if text:
            names = "\0".join(text)
            _git(top, "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul", given=names, **copy)
        options = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color")
        patch = _run("git", "-C", str(top), "diff", "HEAD", *options, given=b"", **copy)
    return patch or b"", sorted(set(untracked) - set(text))


def _is_small_text(path: Path) -> bool:
    try:
        if not path.is_file() or path.is_symlink() or path.stat().st_size > LARGEST_UNTRACKED_BYTES:
            return False
        return b"\0" not in path.read_bytes()
    except OSError:
        return False


def _git(root: Path, *arguments: str, given: str = "", **variables: str) -> str | None:
    """Output of a git command at ``root``; None without git, outside a repository or on failure."""
    command = ("git", "--literal-pathspecs", "-C", str(root), *arguments)
    answer = _run(*command, given=os.fsencode(given), GIT_OPTIONAL_LOCKS="0", **variables)
    return None if answer is None else os.fsdecode(answer)


def _run(*command: str, given: bytes, **variables: str) -> bytes | None:
    try:
        done = subprocess.run(command, input=given, capture_output=True, timeout=60, env={**os.environ, **variables})
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
