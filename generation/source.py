"""What text is generated from: a run directory, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from config.errors import ConfigError
from config.flavors import resolve_shape
from config.shapes import ModelShape
from data.tokenizers import Tokenizer, load_file_tokenizer
from interchange.export import open_run
from interchange.hf_config import read_hf_config
from interchange.load import load_hf_model, load_run_model
from interchange.tokenizer_files import tokenizer_folder
from model.decoder import Decoder


@dataclass(frozen=True)
class Source:
    """A model that is known by its shape; ``load`` reads its weights."""

    name: str
    """What a message calls it: the checkpoint's folder, or the Hugging Face folder."""
    shape: ModelShape
    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]
    """Ids of a prompt as the beginning of a text; never empty."""
    load: Callable[[torch.device, torch.dtype, int], Decoder]
    """(device, dtype of the parameters, positions) -> the model."""
    trained_length: int | None
    """Sequence length of training, if it is recorded."""


def open_source(path: str, step: int | None) -> Source:
    """Recognise ``path`` and read everything but the weights.

    Args:
        step: of a run's checkpoint; None: the newest.

    Raises:
        ConfigError: it is neither kind of folder, holds no (such) checkpoint or no tokenizer, or a model we do not
            have.
    """
    folder = Path(path).expanduser()
    if (folder / "run.json").is_file():
        return _run(folder, step)
    if not (folder / "config.json").is_file():
        what = "holds neither run.json nor config.json" if folder.is_dir() else "no such folder"
        raise ConfigError(f"{path}: {what}. Give a run directory, or a Hugging Face folder with config.json.")
    if step is not None:
        raise ConfigError(
            f"--step {step}: {path} is a Hugging Face folder, which holds one set of weights. Leave it out."
        )
    return _hugging_face(folder)


def _run(folder: Path, step: int | None) -> Source:
    config, checkpoint = open_run(folder, step)
    files = tokenizer_folder(folder)
    if files is None:
        raise ConfigError(
            f"{folder / 'tokenizer'}: holds no tokenizer.json. Every run with checkpoints writes it at its start: put"
            " the files of the run's tokenizer there."
        )
    tokenizer = load_file_tokenizer(str(files), key=str(files))
    return Source(
        name=str(checkpoint),
        shape=resolve_shape(config.model, config.moe),
        tokenizer=tokenizer,
        encode=lambda text: [tokenizer.eos_id, *tokenizer.encode(text)],  # in training a text follows another's end
        load=lambda device, dtype, positions: load_run_model(
            folder,
            step=int(checkpoint.name.removeprefix("step-")),
            device=device,
            dtype=dtype,
            max_positions=positions,
        ),
        trained_length=config.training.seq_len,
    )


def _hugging_face(folder: Path) -> Source:
    shape = read_hf_config(folder)
    tokenizer = load_file_tokenizer(str(folder), key=f"tokenizer of {folder}")
    return Source(
        name=str(folder),
        shape=shape,
        tokenizer=tokenizer,
        encode=lambda text: tokenizer.encode_prompt(text) or [tokenizer.bos_id],
        load=lambda device, dtype, positions: load_hf_model(
            folder, device=device, dtype=dtype, max_positions=positions
        ),
        trained_length=None,
    )
