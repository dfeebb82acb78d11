"""A configuration that trains on a corpus of short generated documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.schema import Config
from tests.data.generated import generated_texts, write_jsonl


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """Builds a Config on tmp_path/corpus/rows.jsonl with bytes as tokens; "section__key" keywords change it."""

    def make(**changes: Any) -> Config:
        corpus = tmp_path / "corpus" / "rows.jsonl"
        if not corpus.exists():
            write_jsonl(corpus, generated_texts(120))
        config = Config()
        defaults = {
            "data__corpus": "text",
            "data__path": str(corpus.parent),
            "data__tokenizer": "bytes",
            "data__cache_dir": str(tmp_path / "cache"),
            "data__prefetch_steps": 0,
            "training__seq_len": 64,
            "training__local_batch_size": 2,
            "training__global_batch_size": 8,
            "training__steps": 10,
            "validation__local_batch_size": 2,
        }
        for name, value in {**defaults, **changes}.items():
            section, key = name.split("__")
            assert hasattr(getattr(config, section), key), name
            setattr(getattr(config, section), key, value)
        return config

    return make
