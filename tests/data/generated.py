"""Small corpora for the tests of the data room."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = "the a river stone wind under over small green boat slowly turns and keeps its naïve weight 42 = x+y —".split()


def generated_texts(count: int, seed: int = 0) -> list[str]:
    """``count`` different texts of 5 to 60 words."""
    draw = random.Random(seed)
    return [f"{i}: " + " ".join(draw.choices(WORDS, k=draw.randint(5, 60))) + "\n" for i in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path
