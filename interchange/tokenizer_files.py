"""The tokenizer that goes with a model, as files that transformers' AutoTokenizer reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def tokenizer_folder(run_dir: str | Path) -> Path | None:
    """Where a run keeps its tokenizer (data/tokenizer_files.py); None for a run that saved no checkpoints."""
    folder = Path(run_dir) / "tokenizer"
    return folder if (folder / "tokenizer.json").is_file() else None


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy those of :data:`FILES` that ``source`` has."""
    for name in FILES:
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
