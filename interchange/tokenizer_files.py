"""What the files of a tokenizer say about the model that goes with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from data.tokenizer_files import COMPANIONS
from data.tokenizers import TOKENIZER_FILES


def tokenizer_folder(run_dir: str | Path) -> Path | None:
    """Where a run keeps its tokenizer (data/tokenizer_files.py); None for a run that saved no checkpoints."""
    folder = Path(run_dir) / "tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the files of a tokenizer that ``source`` has."""
    for name in (*TOKENIZER_FILES, *COMPANIONS):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def special_ids(folder: Path | None) -> tuple[int | None, int | None]:
    """(bos, eos) ids that ``folder``'s files name; None for one that they do not."""
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return None, None
    names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {**_vocabulary(described), **{t["content"]: t["id"] for t in described.get("added_tokens", [])}}

    def found(key: str) -> int | None:
        token = names.get(key)
        return ids.get(token["content"] if isinstance(token, dict) else token)

    return found("bos_token"), found("eos_token")


def _vocabulary(described: dict[str, Any]) -> dict[str, int]:
    vocabulary = described.get("model", {}).get("vocab", {})
    return vocabulary if isinstance(vocabulary, dict) else {}
