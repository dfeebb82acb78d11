"""A Hugging Face folder as a checkpoint that ``checkpoint.initial_load_path`` takes, and the TOML that goes with it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem

from config.errors import ConfigError
from interchange.matching import model_toml
from interchange.pieces import parameter_sizes
from interchange.tokenizer_files import copy_tokenizer
from interchange.weights import HuggingFaceWeights
from trainer.checkpoint_files import writing

SNIPPET = "model.toml"
_PREFIX = "model."


class _Streaming(DefaultSavePlanner):
    """Plans from tensors on the meta device, and reads each one when it is about to be written."""

    def __init__(self, weights: HuggingFaceWeights):
        super().__init__()
        self._weights = weights

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name = write_item.index.fqn.removeprefix(_PREFIX)
        if name == "output.weight" and name not in self._weights:
            name = "tok_embeddings.weight"  # tied: a checkpoint holds it under both names
        assert write_item.tensor_data is not None  # every item is a tensor
        return self._weights.read(name, write_item.tensor_data.size, torch.device("cpu"))


def import_hf(folder: str | Path, out: str | Path) -> Path:
    """Write the weights of a Hugging Face folder as a new checkpoint ``out``, a parameter at a time.

    Beside them lie ``model.toml``, the [model] and [moe] keys that they need, and the tokenizer's files.

    Returns:
        ``out``.

    Raises:
        ConfigError: ``out`` exists, the folder cannot be read, or holds a model we do not have.
    """
    weights, out = HuggingFaceWeights(folder), Path(out).expanduser()
    has_tokenizer = (weights.folder / "tokenizer.json").is_file()
    snippet = model_toml(weights.shape, str(out.absolute()) if has_tokenizer else "")
    part = out.with_name(out.name + ".part")
    for path in (out, part):
        if path.exists():
            raise ConfigError(f"{path}: is there already. Choose a new folder, or remove it.")
    sizes = parameter_sizes(weights.shape)
    if weights.shape.enable_weight_tying:
        sizes["output.weight"] = sizes["tok_embeddings.weight"]
    try:
        state = {_PREFIX + name: torch.empty(size, device="meta") for name, size in sizes.items()}
        with writing(part):
            dcp.save(state, storage_writer=FileSystemWriter(part), planner=_Streaming(weights), no_dist=True)
        (part / SNIPPET).write_text(snippet, encoding="utf-8")
        copy_tokenizer(weights.folder, part)
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return out
