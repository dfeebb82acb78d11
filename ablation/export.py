"""``export``: one flat TOML an arm, which trains by itself and shows every value the arm has."""

from __future__ import annotations

from pathlib import Path

from ablation.guard import guard
from ablation.question import find, read, relative
from config.errors import ConfigError
from config.load import to_toml


def main(arguments: list[str]) -> int:
    """``export NAME [DIRECTORY]``, by default <dump_folder>/<name>-toml; returns 0.

    Raises:
        ConfigError: the question is refused, or a file with another content is in the way.
    """
    if not 1 <= len(arguments) <= 2 or any(word.startswith("-") for word in arguments):
        raise ConfigError("usage: python -m ablation export NAME [DIRECTORY]")
    guarded = guard(read(find(arguments[0]))).accepted()
    question = guarded.question
    dump = guarded.arms[question.table.baseline].resolved.config.job.dump_folder
    folder = Path(arguments[1]) if len(arguments) > 1 else Path(dump) / f"{question.name}-toml"
    texts = {}
    for name, arm in guarded.arms.items():
        head = f"# Arm {name} of {relative(question.path)}, with every value it has. Seeds: {question.table.seeds}.\n\n"
        texts[folder / f"{name}.toml"] = head + to_toml(arm.resolved.config)
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8") != text:
            raise ConfigError(f"{path}: is there with another content; remove it or name another directory")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path}")
    return 0
