"""The finite corpora: folders of files on this machine, read in the order of their names."""

from __future__ import annotations

import ast
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from config.errors import ConfigError
from data.documents import Document, digest
from data.file_hashes import content_hashes
from data.text_files import SUFFIXES, read_text_file

ROOT_SUFFIXES = (".py", ".md", ".rst", ".txt")
TOPICS = "pydoc_data/topics.py"
# Tests are not part of the corpus; packages of the interpreter are data.roots = ["site-packages"].
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
# Written by the build of this one interpreter, with its paths in them: the corpus would differ between machines.
SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "sitecustomize", "usercustomize")


@dataclass
class PythonCorpus:
    """Text of the running Python's standard library without its tests, the prose of pydoc's topics, and further roots.

    Files come sorted by path within the library, then within each root. A file that is not UTF-8 is left out: the user
    did not write it. The corpus differs between Python versions, and its fingerprint with it.
    """

    kind = "python"
    roots: list[str] = field(default_factory=list)
    key: str = "data.corpus"

    def __post_init__(self) -> None:
        self.library = Path(sysconfig.get_path("stdlib"))
        self.folders: list[tuple[str, Path]] = []
        for root in self.roots:
            path = Path(sysconfig.get_path("purelib") if root == "site-packages" else root).expanduser()
            if not path.is_dir():
                raise ConfigError(f'data.roots: {root!r} is not a folder; name an existing folder or "site-packages"')
            self.folders.append((path.resolve().name, path))

    def fingerprint(self, cache: Path | None = None) -> str:
        places = [str(self.library), *(str(root) for _, root in self.folders)]
        return digest("python", _named_hashes(list(self._files()), cache, places))

    def documents(self) -> Iterator[Document]:
        for name, path in self._files():
            text = _decode_or_none(Path(path).read_bytes())
            if text is None:
                continue
            if name == TOPICS:
                yield from _topics(text)
            elif text.strip():
                yield Document(name, text)

    def _files(self) -> Iterator[tuple[str, str]]:
        for name, path in _walk(self.library, SKIPPED_FOLDERS):
            stem, suffix = os.path.splitext(os.path.basename(name))
            if suffix == ".py" and not stem.startswith(SKIPPED_PREFIXES):
                yield name, path
        for label, root in self.folders:
            for name, path in _walk(root, set()):
                if os.path.splitext(name)[1] in ROOT_SUFFIXES:
                    yield f"{label}/{name}", path


@dataclass
class TextCorpus:
    """A file or a folder of .txt, .jsonl (each also .gz or .xz) and .parquet, see data/text_files.py."""

    kind = "text"
    path: str
    text_field: str = "text"
    key: str = "data.path"

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError('data.path is empty; data.corpus = "text" needs the file or folder to train on')
        root = Path(self.path).expanduser()
        if not root.exists():
            raise ConfigError(f"data.path = {self.path!r}: no such file or folder")
        self.place = str(root)
        if root.is_file():
            self.files = [(root.name, str(root))]
        else:
            self.files = _walk(root, set())
        self.files = [(name, path) for name, path in self.files if name.endswith(SUFFIXES)]
        if not self.files:
            raise ConfigError(f"data.path = {self.path!r} holds none of the formats {', '.join(SUFFIXES)}")

    def fingerprint(self, cache: Path | None = None) -> str:
        return digest("text", self.text_field, _named_hashes(self.files, cache, [self.place]))

    def documents(self) -> Iterator[Document]:
        for name, path in self.files:
            yield from read_text_file(name, Path(path), self.text_field)


def _walk(root: Path, skipped: set[str]) -> list[tuple[str, str]]:
    """(path below ``root``, path) of the files there, sorted by the former, without bytecode and hidden folders."""
    found: list[tuple[str, str]] = []
    beginning = len(os.path.join(root, ""))
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in skipped and s != "__pycache__" and not s.startswith(".")]
        inside = os.path.join(folder, "")
        found += [(inside[beginning:] + f, inside + f) for f in files if not f.startswith(".")]
    return sorted(found)


def _named_hashes(files: list[tuple[str, str]], cache: Path | None, places: list[str]) -> list[tuple[str, str]]:
    """Name and hex sha256 of each file, remembered in one file of ``cache`` for the files below ``places``."""
    index = None if cache is None else cache / f"{digest('hashes', [os.path.abspath(place) for place in places])}.json"
    hashes = content_hashes([os.path.abspath(path) for _, path in files], index)
    return list(zip([name for name, _ in files], hashes, strict=True))


def _decode_or_none(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _topics(source: str) -> Iterator[Document]:
    """The entries of ``topics = {name: prose}`` in pydoc_data/topics.py, read without importing it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, prose in ast.literal_eval(node.value).items():
                if prose.strip():
                    yield Document(f"pydoc_data.topics/{name}", prose)
