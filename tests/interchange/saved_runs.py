"""Runs as the tests of this room need them: built and saved by train.py's own functions, without training.

Without transformers, so that rank processes start quickly.
"""

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import train
from config.load import load_file, to_toml
from config.schema import Config
from config.world import mesh_degrees
from data.tokenizer_files import save_tokenizer
from data.tokenizers import ByteTokenizer
from interchange import export, runs
from parallelisms.mesh import Mesh
from parallelisms.names import named_parameters, plain_name
from trainer.checkpoint import Checkpointer


def configuration(snippet: Path, **changes) -> Config:
    """A run of the model that ``snippet`` describes."""
    config = load_file(snippet, {"training.seq_len": 16, "checkpoint.enable": True, "data.tokenizer": "bytes"}).config
    config.training.mixed_precision_param = "float32"
    config.training.local_batch_size = 2
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


def begin_from(folder: Path) -> dict[str, object]:
    """Changes for :func:`configuration`: the first weights are those of a Hugging Face folder."""
    return {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": str(folder)}


def save_run(config: Config, run_dir: Path) -> Path:
    """What train.py leaves of a run that is saved after step 1, without training: every rank calls it."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = Mesh(rank=rank, **mesh_degrees(config, size))
    if dist.is_initialized():
        mesh.connect("cpu")
    model = train.build_model(config, mesh, torch.device("cpu"))
    optimizer = torch.optim.SGD([p for _, p in named_parameters(model)], lr=0.1)
    if rank == 0:
        run_dir.mkdir(parents=True)
        (run_dir / "config.toml").write_text(to_toml(config))
        save_tokenizer(ByteTokenizer(), run_dir / "tokenizer")
    if dist.is_initialized():
        dist.barrier()
    Checkpointer(
        run_dir / "checkpoint", config.checkpoint, model=model, optimizer=optimizer, plain_name=plain_name, parts={},
        steps=1,
    ).save(1)  # fmt: skip
    return run_dir


def whole_parameters(config: Config) -> dict[str, torch.Tensor]:
    """Every parameter of the model as it is built on this mesh, whole; a collective."""
    mesh = Mesh(rank=dist.get_rank(), **mesh_degrees(config, dist.get_world_size()))
    mesh.connect("cpu")
    model = train.build_model(config, mesh, torch.device("cpu"))
    named = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in named_parameters(model)}
    return {n: p.detach() for n, p in named.items()}


def export_at_the_end(config: Config, run_dir: Path) -> None:
    """Save on this mesh, and export as the end of train.py does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    save_run(config, run_dir)
    config.training.steps = 1
    with mock.patch.object(export, "FILE_BYTES", 10_000):  # this process serves other tests too
        runs.export_last(config, run_dir, export.Ranks(rank, size, dist.barrier))
