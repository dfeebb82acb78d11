"""Attempts of a run that did not finish: where their files go, and what the attempt that goes on takes from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.run_lock import LOCK

ATTEMPTS = "attempts"
EVALUATIONS = "evaluations"


def attempts_of(path: Path) -> list[Path]:
    """Folders of earlier attempts, oldest first."""
    folder = path / ATTEMPTS
    numbered = [p for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    return sorted(numbered, key=lambda p: int(p.name))


def move_attempt(path: Path, checkpoints: str) -> Path:
    """Move everything but checkpoints, and what was measured on them, into attempts/<n>. config.toml goes last, so a
    kill in between loses nothing.
    """
    earlier = attempts_of(path)
    if earlier and not (earlier[-1] / "config.toml").exists():
        target = earlier[-1]  # that kill happened: go on where it stopped
    elif (path / "config.toml").exists():
        target = path / ATTEMPTS / str(int(earlier[-1].name) + 1 if earlier else 1)
    else:
        return earlier[-1]  # it fell after the move, before the new record
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(path.iterdir(), key=lambda p: p.name == "config.toml"):
        if file.name not in (ATTEMPTS, checkpoints, EVALUATIONS, LOCK):
            file.rename(target / file.name)
            for events in (target / file.name).rglob("*tfevents*"):
                events.rename(events.with_name(events.name.replace("tfevents", "earlier")))
    return target


def earlier_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl that attempts before this one wrote up to ``step``, by step; the latest of each."""
    lines: dict[int, dict[str, Any]] = {}
    for attempt in attempts_of(path):
        file = attempt / "metrics.jsonl"
        for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue  # cut off by a kill
            if line["step"] <= step:
                lines[line["step"]] = line
    return [lines[s] for s in sorted(lines)]
