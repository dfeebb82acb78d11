"""Models ready to run, from a Hugging Face folder or from a run directory, on one device."""

from __future__ import annotations

from pathlib import Path

import torch

from config.errors import ConfigError
from config.flavors import resolve_shape
from config.schema import Moe
from config.seeds import seeds
from config.shapes import ModelShape
from interchange.export import open_run
from interchange.weights import CheckpointWeights, HuggingFaceWeights
from model.attention import attention_backend
from model.decoder import Decoder
from model.loss import HeadLoss

DEFAULT_POSITIONS = 4096
"""Rows of the rotary table if the caller names none and the model allows more."""


def load_hf_model(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
    backend: str = "sdpa",
) -> Decoder:
    """The model in a Hugging Face folder, in eval mode.

    Args:
        dtype: of its parameters; routers and buffers stay float32.
        max_positions: longest sequence it will see. None: what the model allows, up to DEFAULT_POSITIONS.
        backend: of ``attention.backend``.

    Raises:
        ConfigError: the folder cannot be read, or holds a model we do not have.
    """
    weights = HuggingFaceWeights(folder)
    return _filled(weights, weights.shape, Moe(balance="none"), torch.device(device), dtype, max_positions, backend)


def load_run_model(
    run_dir: str | Path,
    *,
    step: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
    backend: str = "sdpa",
) -> Decoder:
    """The model of a run's checkpoint, in eval mode, with the balancing state that its routing uses.

    Args:
        step: of the checkpoint; None: the newest. Others as :func:`load_hf_model`.

    Raises:
        ConfigError: it is no run directory, or the checkpoint is not there.
    """
    config, folder = open_run(run_dir, step)
    shape = resolve_shape(config.model, config.moe)
    weights = CheckpointWeights(folder)
    seed = seeds(config)["noise_seed"]  # forced routing draws from it in eval mode too
    head = HeadLoss(soft_cap=config.loss.soft_cap)  # of what is trained with capped logits these are the logits
    return _filled(weights, shape, config.moe, torch.device(device), dtype, max_positions, backend, seed, head)


@torch.no_grad()
def _filled(
    weights: HuggingFaceWeights | CheckpointWeights,
    shape: ModelShape,
    moe: Moe,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None,
    backend: str,
    noise_seed: int = 0,
    loss: HeadLoss | None = None,
) -> Decoder:
    """A model with ``weights``, a parameter at a time, so that no second copy of it is ever in memory."""
    positions = min(shape.max_seq_len, DEFAULT_POSITIONS) if max_positions is None else max_positions
    if positions > shape.max_seq_len:
        raise ConfigError(f"{weights.folder}: allows {shape.max_seq_len} positions, and {positions} are asked for")
    with torch.device("meta"):
        kernel = attention_backend(backend)
        model = Decoder(shape, kernel, max_positions=positions, moe=moe, noise_seed=noise_seed, loss=loss)
    for name, parameter in model.named_parameters():
        if not name.endswith("router.gate.weight"):  # the router's product is in moe.router_dtype, as in training
            parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    model.init_buffers()
    for name, parameter in model.named_parameters():
        parameter.copy_(weights.read(name, parameter.shape, device))
    kept = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in kept and name in weights:  # balancing state; a run that begins has none saved
            buffer.copy_(weights.read(name, buffer.shape, device))
    return model.eval().requires_grad_(False)
