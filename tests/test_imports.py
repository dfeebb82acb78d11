"""Imports go one way: each room may import what the table says and nothing else (docs/architecture.md, Rooms)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "config",
    "data",
    "model",
    "parallelisms",
    "trainer",
    "ablation",
    "titan",
    "assembly",
    "train",
    "ablation_train",
    "benchmarks",
    "interchange",
    "generation",
    "generate",
    "evaluation",
    "evaluate",
}


@dataclass(frozen=True)
class Rule:
    """Imports allowed beside the standard library and the room itself. A name covers what is under it."""

    may: tuple[str, ...]
    lazily: tuple[str, ...] = ()  # inside functions only
    never: tuple[str, ...] = ()


TABLE = {
    "config": Rule(may=("tomli", "tomli_w")),
    "ablation": Rule(may=("config", "tomli", "tomli_w"), lazily=("numpy", "matplotlib", "tensorboard")),
    "data": Rule(
        may=("config", "titan", "torch", "datasets", "tokenizers", "numpy"),
        lazily=("pyarrow",),
        never=("torch.distributed",),
    ),
    "model": Rule(
        may=("config", "torch", "triton"),  # triton: files of kernels, which are themselves imported inside functions
        lazily=("liger_kernel", "flash_attn", "quack"),
        never=("torch.distributed",),
    ),
    "parallelisms": Rule(may=("config", "titan", "torch", "triton"), lazily=("torchao",)),  # triton: as above
    "trainer": Rule(may=("config", "titan", "torch", "safetensors", "tomli"), lazily=("tensorboard", "triton")),
    "interchange": Rule(may=("config", "data", "model", "trainer", "torch", "safetensors", "tomli_w")),
    "generation": Rule(may=("config", "data", "interchange", "model", "torch"), never=("torch.distributed",)),
    "evaluation": Rule(may=("config", "tomli"), lazily=("tensorboard",)),
    "titan": Rule(may=("config", "torchtitan")),
    "assembly": Rule(may=("config", "interchange", "model", "parallelisms", "trainer", "torch")),
    "generate": Rule(may=("config", "generation", "torch")),
    "evaluate": Rule(may=("config", "evaluation"), lazily=("interchange", "torch")),
    "ablation_train": Rule(
        may=(), lazily=("config", "data", "interchange", "model", "parallelisms", "trainer", "torch")
    ),
}


def imports(source: str) -> Iterator[tuple[int, str, bool]]:
    """(line, full dotted name, whether loading the file leaves it out) of every import, ``from a import b`` as ``a.b``.

    Left out are those inside a function and under ``if TYPE_CHECKING``.
    """

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.level == 0:
                yield from ((child.lineno, f"{child.module}.{alias.name}", lazy) for alias in child.names)
            elif isinstance(child, ast.Call) and child.args and isinstance(child.args[0], ast.Constant):
                called = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
                if called in ("import_module", "__import__", "find_spec") and isinstance(child.args[0].value, str):
                    yield child.lineno, child.args[0].value, lazy
            types_only = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            deferred = types_only or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, lazy or deferred)

    yield from walk(ast.parse(source), False)


def violations(room: str, source: str, rule: Rule) -> list[str]:
    """What a file of ``room`` imports against ``rule``, a line each."""
    found = []
    for line, name, lazy in imports(source):
        if name.split(".")[0] in sys.stdlib_module_names or name.split(".")[0] in (room, "__future__"):
            continue
        allowed = {*rule.may, *(rule.lazily if lazy else ())}
        prefixes = [p for p in {*allowed, *rule.never} if name == p or name.startswith(f"{p}.")]
        if not prefixes or max(prefixes, key=len) in rule.never:
            hint = " outside a function" if name.split(".")[0] in rule.lazily else ""
            found.append(f"line {line}: {room} may not import {name}{hint}")
    return found


def files_of(room: str) -> list[Path]:
    """The Python files of a room, which is a folder or one file."""
    return sorted((ROOT / room).rglob("*.py")) if (ROOT / room).is_dir() else [ROOT / f"{room}.py"]


@pytest.mark.parametrize("room", TABLE)
def test_a_room_imports_only_what_the_table_allows(room: str) -> None:
    files = files_of(room)
    assert files, f"{room} has no Python file"
    found = [
        f"{path.relative_to(ROOT)}: {v}" for path in files for v in violations(room, path.read_text(), TABLE[room])
    ]
    assert not found, "\n".join(found)


def test_only_titan_imports_torchtitan() -> None:
    for room in ROOMS - {"titan", "benchmarks"}:  # a peer is run from benchmarks, in an environment of its own
        for path in files_of(room):
            names = [name for _, name, _ in imports(path.read_text()) if name.split(".")[0] == "torchtitan"]
            assert not names, f"{path.relative_to(ROOT)} imports {names}; take it through titan.py"


def test_every_top_level_python_room_is_in_the_table() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} | {path.stem for path in ROOT.glob("*.py")}
    assert folders - {"tests"} <= ROOMS, "a new room needs a row in the table"


@pytest.mark.parametrize(
    "room, source, blamed",
    [
        ("config", "import torch", "torch"),
        ("model", "import torch.distributed as dist", "torch.distributed"),
        ("model", "from torch import distributed", "torch.distributed"),
        ("model", "def f():\n    from parallelisms.mesh import Mesh", "parallelisms.mesh.Mesh"),
        ("parallelisms", "from model import decoder", "model.decoder"),
        ("ablation", "import matplotlib.pyplot", "matplotlib.pyplot outside a function"),
        ("ablation", "def f():\n    import torch", "torch"),
        ("trainer", "if TYPE_CHECKING:\n    from model.decoder import Decoder", "model.decoder.Decoder"),
        ("data", "import importlib\nx = importlib.import_module('trainer.metrics')", "trainer.metrics"),
    ],
)
def test_a_wrong_import_is_found(room: str, source: str, blamed: str) -> None:
    assert [v.split("may not import ")[1] for v in violations(room, source, TABLE[room])] == [blamed]


def test_allowed_imports_pass() -> None:
    lazy = (
        "from __future__ import annotations\nimport os\nfrom config.load import load\ndef f():\n    import numpy as np"
    )
    assert violations("ablation", lazy, TABLE["ablation"]) == []
    assert violations("model", "import torch.nn.functional as F\nfrom model.rope import rotate", TABLE["model"]) == []


@pytest.mark.parametrize("room", ["config", "ablation"])
def test_rooms_without_torch_load_without_torch(room: str) -> None:
    """What the syntax tree cannot show: a library that brings torch along."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files_of(room)]
    modules = [name for name in modules if not name.endswith("__main__")]
    heavy = ("torch", "numpy", "matplotlib", "tensorboard", "datasets")
    code = f"import sys, {', '.join(modules)}; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_training_imports_the_compiler_when_it_compiles() -> None:
    """Inductor alone takes two seconds of each rank; what a run may not use is imported where it is used."""
    late = ("torch._inductor.compile_fx", "datasets", "tensorboard", "torchtitan", "liger_kernel", "torchao")
    code = f"import train, sys; print([name for name in {late} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
