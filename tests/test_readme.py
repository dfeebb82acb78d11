"""The README's file tree and the documents it points to are those of the checkout."""

from __future__ import annotations

import re
from pathlib import Path

from ablation.guard import guard
from ablation.question import read

ROOT = Path(__file__).resolve().parent.parent
UNMENTIONED = {"__pycache__", "outputs"}
"""Made by running things."""


def tree() -> list[str]:
    """Names in the first column of the README's file tree; a name in a folder with that folder before it."""
    text = (ROOT / "README.md").read_text()
    block = re.search(r"## Files\n\n```\n(.*?)```", text, re.S)
    assert block is not None, "README.md has no file tree under '## Files'"
    names, folder = [], ""
    for line in block.group(1).splitlines():
        indent, listed, comment = re.fullmatch(r"( *)(\S+(?:, \S+)*) {2,}(\S.*)", line).groups()  # type: ignore[union-attr]
        assert comment, f"README.md: {listed} has no comment"
        for name in listed.split(", "):
            names.append(f"{folder}{name}" if indent else name)
        if not indent:
            folder = listed
    return names


def test_the_question_it_shows_passes_the_guard(tmp_path) -> None:
    (text,) = re.findall(r"```toml\n(base = .*?)```", (ROOT / "README.md").read_text(), re.S)
    path = tmp_path / "shown.toml"
    path.write_text(text.replace("../", f"{ROOT}/train_configs/"))
    assert list(guard(read(path)).accepted().arms) == ["3e-3", "1e-2"]


def test_every_top_level_entry_is_in_the_tree() -> None:
    there = {p.name for p in ROOT.iterdir() if not p.name.startswith(".") and not p.name.endswith(".egg-info")}
    listed = {name.rstrip("/") for name in tree() if "/" not in name.rstrip("/")} | {"README.md"}
    assert there - UNMENTIONED - listed == set(), "README.md, Files: add a line for each"


def test_the_tree_names_only_what_exists() -> None:
    assert [name for name in tree() if not (ROOT / name).exists()] == []


def test_files_that_documents_point_to_exist() -> None:
    """A path in backquotes with a known room before it, in any document."""
    rooms = "ablation|benchmarks|config|data|docs|model|parallelisms|tests|train_configs|trainer"
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for path in re.findall(rf"`((?:{rooms})/[\w./*-]+\.(?:py|md|toml|sh))`", document.read_text()):
            assert list(ROOT.glob(path)), f"{document.name} points to {path}, which is not there"
