"""A run's checkpoint, written as a Hugging Face folder.

The source is always the checkpoint on disk, which holds names and shapes of the whole model whatever mesh wrote it.
So an export is the same bytes for every mesh, needs no collective, and holds one file's tensors in memory at a time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from config.errors import ConfigError
from config.flavors import resolve_shape
from config.load import load_file
from config.loss import NO_SOFT_CAP
from config.schema import Config
from interchange.families import family_of
from interchange.hf_config import hf_config
from interchange.pieces import Piece, parameter_sizes, pieces
from interchange.tokenizer_files import copy_tokenizer, special_ids, tokenizer_folder
from interchange.weights import INDEX, SINGLE, CheckpointWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FILE_BYTES = 5_000_000_000
"""Largest file, as transformers writes them. One tensor is never split."""


@dataclass(frozen=True)
class Ranks:
    """Who writes: each rank every ``world_size``-th file, and rank 0 the rest. Alone by default."""

    rank: int = 0
    world_size: int = 1
    barrier: Callable[[], None] = lambda: None
    """Returns once every rank has called it."""


def export_run(run_dir: str | Path, out: str | Path, *, step: int | None = None, dtype: str = "float32") -> Path:
    """Write a checkpoint of ``run_dir`` as a new Hugging Face folder ``out``.

    Args:
        step: of the checkpoint; None: the newest.
        dtype: "float32", as weights are kept, or "bfloat16", rounded to nearest even.

    Returns:
        ``out``.

    Raises:
        ConfigError: ``out`` exists, the run or its checkpoint is not there, or no family holds its model.
    """
    out = Path(out).expanduser()
    part = out.with_name(out.name + ".part")
    if part.exists():
        raise ConfigError(f"{part}: is there already, perhaps left by an export that was stopped. Remove it first.")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    config, folder = open_run(run_dir, step)
    return export_checkpoint(config, folder, out, tokenizer=tokenizer_folder(run_dir), dtype=dtype)


def open_run(run_dir: str | Path, step: int | None) -> tuple[Config, Path]:
    """The configuration of a run and the step folder of its checkpoint ``step``, or of the newest.

    Raises:
        ConfigError: it is no run directory, or the checkpoint is not there.
    """
    from trainer.checkpoint import complete_steps

    path = Path(run_dir).expanduser() / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{run_dir}: no run directory: it holds no config.toml")
    config = load_file(path).config
    folder = path.parent / config.checkpoint.folder
    steps = complete_steps(folder)
    if not steps:
        raise ConfigError(f"{folder}: holds no complete checkpoint. Train with checkpoint.enable = true.")
    if step is not None and step not in steps:
        raise ConfigError(f"--step {step}: {folder} holds steps {', '.join(map(str, steps))}")
    return config, folder / f"step-{steps[-1] if step is None else step}"


def export_checkpoint(
    config: Config,
    step_folder: Path,
    out: Path,
    *,
    tokenizer: Path | None,
    dtype: str = "float32",
    ranks: Ranks = Ranks(),  # noqa: B008  # immutable
) -> Path:
    """:func:`export_run` for a configuration and checkpoint that are known, by all ranks of a job or by one process.

    ``out`` appears whole, by a rename. With more than one rank its folder is on a file system that they share, as
    checkpoints are.
    """
    shape = resolve_shape(config.model, config.moe)
    family = family_of(shape, config.moe)
    if config.loss.soft_cap:
        raise ConfigError(f"loss.soft_cap = {config.loss.soft_cap} of the run: {NO_SOFT_CAP}.")
    weights = CheckpointWeights(step_folder)
    if out.exists():
        raise ConfigError(f"{out}: is there already. Choose a new folder.")
    part = out.with_name(out.name + ".part")
    if ranks.rank == 0:
        shutil.rmtree(part, ignore_errors=True)  # of a job that was killed here
        part.mkdir(parents=True)
    ranks.barrier()

    sizes = parameter_sizes(shape)
    files = _plan(list(pieces(shape, family)), sizes, DTYPES[dtype].itemsize)
    names = _file_names(len(files))
    for number in range(ranks.rank, len(files), ranks.world_size):
        tensors = dict(_tensors(files[number], sizes, weights, DTYPES[dtype]))
        save_file(tensors, part / names[number], metadata={"format": "pt"})
        (part / names[number]).chmod(part.stat().st_mode & 0o666)  # safetensors lets the owner alone read it
        _sync(part / names[number])
        del tensors
    ranks.barrier()
    if ranks.rank == 0:
        if len(files) > 1:
            _write_index(part / INDEX, files, names, sizes, DTYPES[dtype].itemsize)
        bos_id, eos_id = special_ids(tokenizer)
        _write_json(part / "config.json", hf_config(shape, dtype=dtype, bos_id=bos_id, eos_id=eos_id))
        if tokenizer is not None:
            copy_tokenizer(tokenizer, part)
        part.rename(out)
        _sync(out.parent)
    ranks.barrier()
    return out


def _plan(all_pieces: list[Piece], sizes: dict[str, torch.Size], itemsize: int) -> list[list[Piece]]:
    """Pieces in order, cut into files of at most FILE_BYTES."""
    files: list[list[Piece]] = [[]]
    filled = 0
    for piece in all_pieces:
        size = prod(_size(piece, sizes)) * itemsize
        if filled + size > FILE_BYTES and files[-1]:
            files.append([])
            filled = 0
        files[-1].append(piece)
        filled += size
    return files


def _size(piece: Piece, sizes: dict[str, torch.Size]) -> torch.Size:
    return piece.view(torch.empty(sizes[piece.name], device="meta")).shape


def _file_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _tensors(
    file: list[Piece], sizes: dict[str, torch.Size], weights: CheckpointWeights, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one file. Pieces of a parameter are neighbours, so it is read once."""
    held, parameter = "", torch.empty(0)
    for piece in file:
        if piece.name != held:
            held, parameter = piece.name, weights.read(piece.name, sizes[piece.name], torch.device("cpu"))
        view = piece.view(parameter)
        yield piece.hf, torch.empty(view.shape, dtype=dtype).copy_(view)


def _write_index(
    path: Path, files: list[list[Piece]], names: list[str], sizes: dict[str, torch.Size], itemsize: int
) -> None:
    listed = {piece.hf: name for file, name in zip(files, names, strict=True) for piece in file}
    numbers = sum(prod(_size(piece, sizes)) for file in files for piece in file)
    _write_json(path, {"metadata": {"total_size": numbers * itemsize}, "weight_map": dict(sorted(listed.items()))})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
