"""Where weights are read from, a whole parameter at a time: a Hugging Face folder or a checkpoint of ours."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open

from config.errors import ConfigError
from interchange.hf_config import hf_family, read_config, shape_of
from interchange.pieces import Piece, pieces
from trainer.checkpoint_files import check_files, reading

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NOT_WEIGHTS = ("rotary_emb.inv_freq",)
"""Ends of names of tensors that older folders hold and that follow from config.json."""


class HuggingFaceWeights:
    """Weights of a Hugging Face folder, under our names.

    Files are mapped into memory and read where they are asked for: a rank touches one parameter at a time.

    Args:
        folder: with config.json and model.safetensors, or model.safetensors.index.json and the files it names.

    Raises:
        ConfigError: a file is missing or unreadable, config.json describes no shape of ours, or the tensors in the
            folder are not those of that shape.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder).expanduser()
        config = read_config(self.folder)
        where = str(self.folder / "config.json")
        self.family, self.shape = hf_family(config, where), shape_of(config, where)
        self._files = _tensor_files(self.folder)
        self._open: dict[Path, safe_open] = {}
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for piece in pieces(self.shape, self.family):
            self._pieces[piece.name].append(piece)
        self._check_names()

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def __iter__(self):
        return iter(self._pieces)

    def read(self, name: str, size: torch.Size, device: torch.device) -> torch.Tensor:
        """The whole parameter ``name`` in float32, exactly as stored.

        Raises:
            ConfigError: a tensor is not of the size that config.json implies.
        """
        full = torch.empty(size, dtype=torch.float32, device=device)
        for piece in self._pieces[name]:
            stored, target = self._handle(piece.hf).get_tensor(piece.hf), piece.view(full)
            if stored.shape != target.shape or not stored.is_floating_point():
                raise ConfigError(
                    f"{self._files[piece.hf]}: {piece.hf} is {stored.dtype} {tuple(stored.shape)}; config.json implies"
                    f" floating-point numbers of shape {tuple(target.shape)}"
                )
            target.copy_(stored)
        return full

    def _handle(self, tensor: str) -> safe_open:
        path = self._files[tensor]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt", device="cpu")
        return self._open[path]

    def _check_names(self) -> None:
        wanted = {piece.hf for parts in self._pieces.values() for piece in parts}
        tied = {"lm_head.weight"} if self.shape.enable_weight_tying else set()
        extra = sorted(n for n in self._files.keys() - wanted - tied if not n.endswith(_NOT_WEIGHTS))
        missing = sorted(wanted - self._files.keys())
        if missing:
            raise ConfigError(f"{self.folder}: {missing[0]} is missing ({len(missing)} tensors in all)")
        if extra:
            raise ConfigError(
                f"{self.folder}: {extra[0]} has no place in {self.family.architecture} ({len(extra)} tensors in all)"
            )


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index, single = folder / INDEX, folder / SINGLE
    try:
        if index.is_file():
            listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {str(file) for file in listed.values()}
        elif single.is_file():
            listed, names = None, {SINGLE}
        else:
            raise ConfigError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
        if strange := sorted(name for name in names if Path(name).name != name):
            raise ConfigError(f"{index}: {strange[0]} is not a file of this folder")
        held: dict[str, Path] = {}
        for name in sorted(names):
            with safe_open(folder / name, framework="pt", device="cpu") as file:
                held |= dict.fromkeys(file.keys(), folder / name)
        if listed is not None and (lost := sorted(listed.keys() - held.keys())):
            raise ConfigError(f"{index}: names {lost[0]}, which {listed[lost[0]]} does not hold")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{folder}: the weights cannot be read: {error}") from None
    return held


class CheckpointWeights:
    """Weights in a step folder of trainer/checkpoint.py, whatever mesh wrote it.

    Raises:
        ConfigError: ``step_folder`` is no complete checkpoint, or a file of it is damaged.
    """

    def __init__(self, step_folder: str | Path):
        self.folder = Path(step_folder)
        if not (self.folder / ".metadata").is_file():
            raise ConfigError(f"{self.folder}: no complete checkpoint. Give a step-<n> folder of a run.")
        stored = check_files(self.folder).state_dict_metadata
        self._stored = {name.removeprefix("model."): m for name, m in stored.items() if name.startswith("model.")}

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def sizes(self) -> dict[str, torch.Size]:
        """Name -> size of every parameter and buffer."""
        return {name: stored.size for name, stored in self._stored.items()}

    def read(self, name: str, size: torch.Size, device: torch.device) -> torch.Tensor:
        """The whole parameter or buffer ``name`` in the dtype it was saved in.

        Raises:
            ConfigError: it is missing, of another size, or cannot be read.
        """
        stored = self._stored.get(name)
        if stored is None or stored.size != size:
            found = "is missing" if stored is None else f"has shape {tuple(stored.size)}"
            raise ConfigError(f"{self.folder}: {name} {found}; config.toml implies {tuple(size)}")
        # Read to the CPU: a rank of a running job has other uses for its GPU's memory.
        state = {"model": {name: torch.empty(size, dtype=stored.properties.dtype)}}
        with reading(self.folder):
            dcp.load(state, checkpoint_id=self.folder, no_dist=True)
        return state["model"][name].to(device)
