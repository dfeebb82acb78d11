"""From files, an arm and a command line to one checked configuration in which every value has an origin.

Order, later wins: defaults <- bases (left to right) <- file <- arm <- command line.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from functools import reduce
from pathlib import Path
from typing import Any

from config import command_line, paths, rules, torchtitan_keys
from config.errors import ConfigError
from config.keys import all_keys, companions, did_you_mean, matters, shown, value_of
from config.schema import Config
from config.toml_file import Document, check_leaf, read

__all__ = ["Resolved", "companions", "flatten", "from_flat", "load", "load_file", "to_toml"]

_NOT_PART_OF_THE_RUN = ("job.config_file", "job.run_dir", "job.dry_run")


@dataclass
class Resolved:
    """A configuration and where it came from."""

    config: Config
    origins: dict[str, str]
    """Full key -> file name, ``file [arms.x]``, "command line" or "default"; a translated key also says from which."""
    files: list[Path] = field(default_factory=list)
    """Files that were read, in the order in which they were overlaid."""
    base_diff: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Full key -> (value of the bases, value now). Without a base, the file itself is the base."""
    notes: list[str] = field(default_factory=list)
    """What the user should know but need not change, a sentence each."""
    ablation: dict[str, Any] = field(default_factory=dict)
    """The [ablation] table as it stands in the file."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arm name -> {full key: value}."""
    arm: str | None = None


def load(argv: list[str] | None = None) -> Resolved:
    """The configuration of a training run, from its command line (default: that of this process).

    ``--help`` prints every option and exits with 0. Unless ``--job.dry_run`` is given, files and folders that the run
    will read must exist. Nothing is created.

    Raises:
        ConfigError: any mistake in the files or on the command line.
    """
    line = command_line.parse(sys.argv[1:] if argv is None else argv)
    if line.wants_help:
        try:
            print(command_line.help_text(), flush=True)
        except BrokenPipeError:  # the reader, such as head, has seen enough
            sys.stdout = open(os.devnull, "w")
        raise SystemExit(0)
    resolved = _resolve(read(line.config_file) if line.config_file else None, line.leaves, line.arm)
    if not resolved.config.job.dry_run:
        paths.check_files(resolved.config, resolved.origins)
    return resolved


def load_file(path: str | Path, overrides: dict[str, Any] | None = None, arm: str | None = None) -> Resolved:
    """The same from a file and ``{full key: value}``; does not look whether data and tokenizer files exist.

    Raises:
        ConfigError: any mistake; a file with arms and no ``arm``; an arm that the file does not have.
    """
    checked = {full: check_leaf(full, value, command_line.WHERE, "--{}") for full, value in (overrides or {}).items()}
    return _resolve(read(path), checked, arm)


def flatten(config: Config) -> dict[str, Any]:
    """Full key -> value, for every key of the schema, in its order."""
    return {full: value_of(config, full) for full in all_keys()}


def from_flat(values: dict[str, Any]) -> Config:
    """A :class:`Config` from full key -> checked value; keys left out have their default."""
    config = Config()
    for full, value in values.items():
        section, _, name = full.rpartition(".")
        setattr(value_of(config, section), name, value)
    return config


def to_toml(config: Config) -> str:
    """Flat TOML that loads again to an equal configuration. Unset keys and what names this run are left out."""
    import tomli_w

    tree: dict[str, dict[str, Any]] = {f.name: {} for f in fields(Config)}
    for full, value in flatten(config).items():
        if value is not None and full not in _NOT_PART_OF_THE_RUN:
            *tables, name = full.split(".")
            reduce(lambda table, inner: table.setdefault(inner, {}), tables, tree)[name] = value
    return tomli_w.dumps({section: table for section, table in tree.items() if table})


@dataclass
class _Merged:
    """Layers laid over each other. ``foreign`` holds torchtitan's own keys, judged at the end."""

    values: dict[str, Any] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def overlay(self, leaves: dict[str, Any], origin: str, where: str) -> None:
        """Lay one layer over the others; ``where`` leads a message about it."""
        corpus = self.values.get("data.corpus", all_keys()["data.corpus"].default)
        extra = torchtitan_keys.translated(leaves, self.foreign, corpus, where)
        if "data.corpus" in leaves:  # the layers below named a data set; this one replaces it
            for twin in ("training.dataset", "training.dataset_path"):
                self.foreign.pop(twin, None)
        for full, (value, source) in extra.items():
            self.values[full] = value
            self.origins[full] = f"{origin}, from {source}"
        for full, value in leaves.items():
            if full not in all_keys():
                self.foreign[full] = value
            elif full in extra:
                continue
            else:
                self.values[full] = value
            self.origins[full] = origin

    def flat(self) -> dict[str, Any]:
        return {full: self.values.get(full, key.default) for full, key in all_keys().items()}


def _resolve(document: Document | None, overrides: dict[str, Any], arm: str | None) -> Resolved:
    merged, base = _Merged(), None
    documents = document.in_order() if document else []
    for d in documents:
        if d is document and document.bases:
            base = merged.flat()
        merged.overlay(d.leaves, d.path.name, str(d.path))
    if base is None:
        base = merged.flat()
    for name, leaves in _arms(document, arm):
        assert document is not None
        merged.overlay(leaves, f"{document.path.name} [arms.{name}]", f"{document.path} [arms.{name}]")
    merged.overlay(overrides, command_line.WHERE, command_line.WHERE)
    notes = torchtitan_keys.judged(merged.foreign, merged.origins, merged.values)
    config = from_flat(merged.values)
    if document:
        config.job.config_file = str(document.path)
        merged.origins["job.config_file"] = command_line.WHERE
    origins = {full: merged.origins.get(full, "default") for full in all_keys()}
    notes += rules.check(config, origins)
    now = flatten(config)
    for full in all_keys():
        if origins[full] == command_line.WHERE or "[arms." in origins[full]:
            notes += _inert(full, origins[full], now)
    changed = {
        full: (base[full], value)
        for full, value in now.items()
        if value != base[full] and full not in _NOT_PART_OF_THE_RUN
    }
    resolved = Resolved(config, origins, [d.path for d in documents], changed, notes)
    if document:
        resolved.ablation, resolved.arms, resolved.arm = document.ablation, document.arms, arm
    return resolved


def _arms(document: Document | None, arm: str | None) -> list[tuple[str, dict[str, Any]]]:
    """The arm's changes in order. ``a+b`` is both: a factorial's or a ladder's combination."""
    arms = document.arms if document else {}
    if not arm:
        if document and (arms or document.ablation):
            names = ", ".join(arms) or "none are defined"
            raise ConfigError(
                f"{document.path} is an ablation: say which arm with --ablation.arm NAME (arms: {names});"
                f" for python -m config that is {document.path}:NAME"
            )
        return []
    if not arms:
        source = str(document.path) if document else "no --job.config_file, so it"
        raise ConfigError(f"{command_line.WHERE}: --ablation.arm {arm}: {source} has no [arms]")
    chosen: list[tuple[str, dict[str, Any]]] = []
    for name in [arm] if arm in arms else arm.split("+"):
        if name not in arms:
            raise ConfigError(
                f"{command_line.WHERE}: --ablation.arm {arm}: {document.path} has no arm {shown(name)}"  # type: ignore[union-attr]
                f"{did_you_mean(name, arms)} (arms: {', '.join(arms)})"
            )
        for other, leaves in chosen:
            for full in leaves.keys() & arms[name].keys():
                if leaves[full] != arms[name][full]:
                    raise ConfigError(
                        f"--ablation.arm {arm}: {other} sets {full} = {shown(leaves[full])},"
                        f" {name} sets it to {shown(arms[name][full])}; arms that set a key differently do not combine"
                    )
        chosen.append((name, arms[name]))
    return chosen


def _inert(full: str, origin: str, values: dict[str, Any]) -> list[str]:
    """A note that a key which was set on purpose, by an arm or on the command line, has no effect."""
    parent, active = companions().get(full, ("", ()))
    if not parent or matters(values[parent], active):
        return []
    return [f"{full} ({origin}) has no effect while {parent} = {shown(values[parent])}"]
