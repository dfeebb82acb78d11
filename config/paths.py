"""Whether the files and folders that a run will read are there. Looks at names and sizes, never at contents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from config.errors import ConfigError
from config.keys import all_keys, shown
from config.rules import SOURCE_KEYS, tokenizer_kind
from config.schema import Config


def check_files(config: Config, origins: dict[str, str]) -> None:
    """Check that what the run will read exists: corpus, tokenizer, further roots.

    Raises:
        ConfigError: every missing or empty path, a line each.
    """
    broken = list(missing_files(config, origins))
    if broken:
        raise ConfigError("\n".join(broken))


def missing_files(config: Config, origins: dict[str, str]) -> Iterator[str]:
    """What :func:`check_files` refuses, a sentence each."""

    def said(full: str, value: str) -> str:
        return f"{full} = {shown(value)} ({origins[full]})" if full in origins else f"{full} = {shown(value)}"

    data = config.data
    yield from _missing_corpus(vars(data), lambda name, value: said(f"data.{name}", value))
    if data.corpus == "mixture":
        defaults = {name: all_keys()[f"data.{name}"].default for name in SOURCE_KEYS}
        for number, source in enumerate(data.sources, start=1):
            where = f"data.sources, table {number}: "
            yield from _missing_corpus(defaults | source, lambda name, value, w=where: f"{w}{name} = {shown(value)}")  # type: ignore[misc]
    if tokenizer_kind(config) == "file":
        folder = Path(config.model.hf_assets_path).expanduser()
        where = said("model.hf_assets_path", config.model.hf_assets_path)
        way_out = 'Put tokenizer.json there, or set data.tokenizer = "bpe" or "bytes".'
        if not folder.is_dir():
            yield f"{where}: no such folder{_from_here(folder)}; the tokenizer is read from it. {way_out}"
        elif not (folder / "tokenizer.json").is_file():
            yield f"{where}: holds no tokenizer.json. {way_out}"
    for full, path in (("job.run_dir", config.job.run_dir), ("job.dump_folder", config.job.dump_folder)):
        if path and Path(path).expanduser().exists() and not Path(path).expanduser().is_dir():
            yield f"{said(full, path)}: is a file; expected a folder, or a name that is free"


def _from_here(path: Path) -> str:
    """Where a relative path was looked for."""
    return "" if path.is_absolute() else f" (relative to {Path.cwd()})"


def _missing_corpus(keys: dict[str, Any], said: Callable[[str, str], str]) -> Iterator[str]:
    if keys["corpus"] == "text":
        path = Path(keys["path"]).expanduser()
        if not path.exists():
            yield f"{said('path', keys['path'])}: no such file or folder{_from_here(path)}"
        elif path.is_dir() and not any(path.iterdir()):
            yield f"{said('path', keys['path'])}: the folder is empty; expected .txt, .jsonl or .parquet files."
        elif path.is_file() and path.stat().st_size == 0:
            yield f"{said('path', keys['path'])}: the file is empty."
    elif keys["corpus"] == "hf":
        name = keys["name"]
        if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().exists():
            yield f"{said('name', name)}: no such folder."
    elif keys["corpus"] == "python":
        for root in keys["roots"]:
            if root != "site-packages" and not Path(root).expanduser().is_dir():
                yield f"{said('roots', root)}: no such folder."
