"""``new``: a question from plain TOML files. Its variable is what they differ in."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ablation.differences import Changes, changed, is_inert, root_of
from ablation.guard import guard
from ablation.overview import summary
from ablation.question import QUESTIONS, ROOT, read, relative
from config.errors import ConfigError
from config.keys import shown
from config.load import flatten, load_file

_SCRIPT = """\
#!/usr/bin/env bash
exec "$(dirname "${{BASH_SOURCE[0]}}")/{runner}" "${{BASH_SOURCE[0]%.sh}}.toml" "$@"
"""


def main(arguments: list[str]) -> int:
    """``new A.toml B.toml [C.toml ...]``; returns 0.

    Raises:
        ConfigError: the files differ in nothing or in too much, or the question is there already.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ablation new",
        allow_abbrev=False,
        description="Write a question (TOML and script) from plain TOML files; the first is the baseline.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.toml")
    parser.add_argument("--name", default="", help="its name, or a path ending in .toml (default: A_vs_B)")
    design = parser.add_mutually_exclusive_group()
    design.add_argument("--factorial", dest="design", action="store_const", const="factorial", default="")
    design.add_argument("--ladder", dest="design", action="store_const", const="ladder")
    options = parser.parse_args(arguments)
    name = options.name or "_vs_".join(path.stem for path in options.files)
    target = Path(name) if name.endswith(".toml") else QUESTIONS / f"{name}.toml"
    script = write(options.files, target, options.design)
    print(f"wrote {relative(target)} and {relative(script)}\n{summary(guard(read(target)))}")
    print("Say in it what you expect, and the step and tolerance of the decision, before you run it.")
    return 0


def write(files: list[Path], target: Path, design: str = "") -> Path:
    """Write the question ``target`` from plain files, baseline first, and its script, whose path is returned.

    ``design`` ("factorial", "ladder") takes two files that differ in several keys and makes an arm of each key.

    Raises:
        ConfigError: nothing is written.
    """
    script = target.with_suffix(".sh")
    for path in (target, script):
        if path.exists():
            raise ConfigError(f"{relative(path)}: is there already; choose another --name")
    if len(files) < 2 or (design and len(files) > 2):
        raise ConfigError(
            f"new{f' --{design}' if design else ''}: takes {'two' if design else 'two or more'} TOML files"
        )
    variables, arms = _split(files) if design else _single(files)
    text = _text(files[0], target, variables, arms, design)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("x", encoding="utf-8") as file:
        file.write(text)
    try:
        guard(read(target)).accepted()
    except ConfigError:
        target.unlink()
        raise
    script.write_text(_SCRIPT.format(runner=os.path.relpath(ROOT / "run_ablation.sh", target.parent)))
    script.chmod(0o755)
    return script


def _difference(base: Path, other: Path) -> Changes:
    """What ``other`` changes, each key as one line of an arm could set it."""
    after = flatten(load_file(other).config)
    difference = changed(flatten(load_file(base).config), after)
    if not difference:
        raise ConfigError(f"{other}: the same configuration as {base}; there is nothing to compare")
    for key, (was, now) in difference.items():
        if now is None:
            raise ConfigError(f"{other}: leaves {key} unset, which {base} sets to {shown(was)}; name {other} first")
    return {key: pair for key, pair in difference.items() if not is_inert(key, after)}


def _single(files: list[Path]) -> tuple[list[str], dict[str, Changes]]:
    """One variable, an arm a file; every arm differs from the first file in it and its companions."""
    differences = {path.stem: _difference(files[0], path) for path in files[1:]}
    if len(differences) < len(files) - 1 or files[0].stem in differences:
        raise ConfigError("new: arms are named after the files; give them different names")
    roots = list(dict.fromkeys(root_of(key, d) for d in differences.values() for key in d))
    if len(roots) > 1:
        raise ConfigError(
            f"new: the files differ in {len(roots)} keys ({', '.join(roots)}); an ablation changes one. Make them "
            "agree in all but one, or ask about all of them with --factorial or --ladder"
        )
    return roots, differences


def _split(files: list[Path]) -> tuple[list[str], dict[str, Changes]]:
    """Several variables, an arm a variable, with its companions."""
    difference = _difference(files[0], files[1])
    arms: dict[str, Changes] = {}
    for key, pair in difference.items():
        arms.setdefault(root_of(key, difference), {})[key] = pair
    leaves = [root.rpartition(".")[2] for root in arms]
    names = [
        root.replace(".", "_") if leaves.count(leaf) > 1 else leaf for root, leaf in zip(arms, leaves, strict=True)
    ]
    return list(arms), dict(zip(names, arms.values(), strict=True))


def _text(base: Path, target: Path, variables: list[str], arms: dict[str, Changes], design: str) -> str:
    config = load_file(base).config
    metric = "validation_metrics/loss" if config.validation.enable else "loss_metrics/global_avg_loss"
    first = (
        {} if design else {k: v[0] for k, v in next(iter(arms.values())).items() if k in variables and v[0] is not None}
    )
    about = " and ".join(variables)
    lines = [
        f"base = {shown(os.path.relpath(base.resolve(), target.resolve().parent))}",
        "",
        "[ablation]",
        f'question   = "What does {about} do to loss and throughput?"',
        'hypothesis = ""',
        f"variable   = {shown(variables if len(variables) > 1 else variables[0])}",
        *([f"design     = {shown(design)}"] if design else []),
        f"baseline   = {shown(base.stem)}",
        "seeds      = [1, 2, 3]",
        "aa         = true",
        "",
        "[ablation.decide]",
        f"metric = {shown(metric)}",
        "step   = 0                 # the last",
    ]
    for name, values in (
        {base.stem: first} | {n: {k: pair[1] for k, pair in d.items()} for n, d in arms.items()}
    ).items():
        lines += ["", f"[arms.{shown(name) if '.' in name else name}]"]
        lines += [f"{key} = {shown(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
