"""The finite corpora: folders of files on this machine, read in the order of their names."""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from config.errors import ConfigError
from data.documents import Document, digest
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

    def fingerprint(self) -> str:
        files = list(self._files())
        return digest("python", list(zip([name for name, _ in files], _content_hashes(files), strict=True)))

    def documents(self) -> Iterator[Document]:
        for name, path in self._files():
            text = _decode_or_none(path.read_bytes())
            if text is None:
                continue
            if name == TOPICS:
                yield from _topics(text)
            elif text.strip():
                yield Document(name, text)

    def _files(self) -> Iterator[tuple[str, Path]]:
        for path in _walk(self.library, SKIPPED_FOLDERS):
            if path.suffix == ".py" and not path.name.startswith(SKIPPED_PREFIXES):
                yield path.relative_to(self.library).as_posix(), path
        for label, root in self.folders:
            for path in _walk(root, set()):
                if path.suffix in ROOT_SUFFIXES:
                    yield f"{label}/{path.relative_to(root).as_posix()}", path


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
        self.files: list[tuple[str, Path]] = []
        if root.is_file():
            self.files = [(root.name, root)]
        else:
            for path in _walk(root, set()):
                if path.name.endswith(SUFFIXES):
                    self.files.append((path.relative_to(root).as_posix(), path))
        if not self.files or not self.files[0][1].name.endswith(SUFFIXES):
            raise ConfigError(f"data.path = {self.path!r} holds none of the formats {', '.join(SUFFIXES)}")

    def fingerprint(self) -> str:
        names = [name for name, _ in self.files]
        return digest("text", self.text_field, list(zip(names, _content_hashes(self.files), strict=True)))

    def documents(self) -> Iterator[Document]:
        for name, path in self.files:
            yield from read_text_file(name, path, self.text_field)


def _walk(root: Path, skipped: set[str]) -> list[Path]:
    """The files below ``root``, sorted by relative path, without bytecode and hidden folders."""
    found: list[Path] = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in skipped and s != "__pycache__" and not s.startswith(".")]
        found += [Path(folder, f) for f in files if not f.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _content_hashes(files: list[tuple[str, Path]]) -> list[str]:
    """Hex sha256 of each file's bytes. Reads them all, so no change is missed: about a second a gigabyte and core.

    Raises:
        ConfigError: a file that cannot be read, such as a link to nothing.
    """

    def one(entry: tuple[str, Path]) -> str:
        try:
            with open(entry[1], "rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"{entry[1]}: cannot be read: {error.strerror}; repair or remove it") from None

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(one, files))


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
