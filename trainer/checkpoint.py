"""Checkpoints with torch.distributed.checkpoint: everything a run needs to go on as if it had not stopped.

    <run_dir>/checkpoint/step-<n>/       complete: appears by a rename, after every rank's files are on the disk
    <run_dir>/checkpoint/step-<n>.part/  being written, or left by a kill; never read, replaced by the next save of the
    step

Saved are the weights and buffers (a MoE layer's balancing state among them), the optimizer's states, and the small
``parts`` that the trainer names: where the data stand, steps skipped, torch's generator. The learning rate is a
function of the step and needs no saving. Names are those of the model's author, so a checkpoint can be loaded under
another mesh.
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from config.errors import ConfigError
from config.keys import shown
from config.schema import Checkpoint
from trainer.checkpoint_files import reading, writing

logger = logging.getLogger(__name__)

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name, so that groups may change


class Part(Protocol):
    """Something small with a state that pickles."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RandomState:
    """torch's CPU generator. No layer draws from it; whoever adds one that does finds it restored."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in ``folder``, ascending."""
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir() if (path / ".metadata").is_file())
    return sorted(int(match[1]) for match in found if match)


def step_to_continue(folder: Path | None, section: Checkpoint) -> int:
    """The step a run continues from, 0 if from the beginning. Reads names only.

    Args:
        folder: of its checkpoints; None for a run that is new.

    Raises:
        ConfigError: checkpoint.load_step is not there, or a run that begins finds no checkpoint at
            checkpoint.initial_load_path.
    """
    steps = complete_steps(folder) if folder else []
    step = section.load_step if section.load_step >= 0 else max(steps, default=0)
    if section.load_step > 0 and section.load_step not in steps:
        there = f"{folder} holds steps {', '.join(map(str, steps))}" if steps else "there is no complete checkpoint yet"
        raise ConfigError(f"checkpoint.load_step = {section.load_step}: {there}. Set it to one of them, or to -1.")
    initial = "" if step else section.initial_load_path
    if initial and not section.initial_load_in_hf and not (Path(initial) / ".metadata").is_file():
        raise ConfigError(
            f"checkpoint.initial_load_path = {shown(initial)}: no complete checkpoint. Give a step-<n> folder of a run."
        )
    return step


class Checkpointer:
    """Saves and restores one run. Every rank makes one and calls the same methods at the same steps.

    Args:
        folder: of the checkpoints.
        plain_name: a parameter's name without what wrappers and pipeline stages put in.
        plain_weight: a weight without the class that a technique put around it, sharing its storage.
        parts: name -> small state, the same on every rank.
        steps: the run's last step, which is always saved.
    """

    def __init__(
        self,
        folder: Path,
        section: Checkpoint,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plain_name: Callable[[str], str],
        parts: dict[str, Part],
        steps: int,
        plain_weight: Callable[[Any], Any] = lambda weight: weight,
    ):
        self._folder, self._section, self._steps = folder, section, steps
        self._model, self._optimizer, self._plain = model, optimizer, plain_name
        self._plain_weight = plain_weight
        self._parts = {"random": RandomState(), **parts}
        self._writing: Future[None] | None = None
        # A group of its own: collectives of a background save must not meet those of training.
        background = section.async_mode == "async" and dist.is_initialized()
        self._group = dist.new_group(backend="gloo") if background else None

    def restore(self) -> int:
        """Load what ``step_to_continue`` names, say so, and return its step.

        Raises:
            ConfigError: a file of it cannot be read.
        """
        step = step_to_continue(self._folder, self._section)
        if step:
            state = self._state()
            with reading(self._path(step)):
                dcp.load(state, checkpoint_id=self._path(step), no_dist=not dist.is_initialized())
            loaded = {name: state["optimizer"][self._plain_state(name)] for name in self._states()}
            set_optimizer_state_dict(self._model, self._optimizer, loaded, options=_OPTIONS)
            self._set_weights(state["model"])
            for name, part in self._parts.items():
                part.load_state_dict(pickle.loads(state["parts"][name]))
            logger.info("Continuing after step %d, from %s", step, self._path(step))
        elif self._section.initial_load_path and not self._section.initial_load_in_hf:  # those it was made with
            self._load_weights(Path(self._section.initial_load_path))
            logger.info("Weights from %s", self._section.initial_load_path)
        return step

    def _load_weights(self, path: Path) -> None:
        """Parameters, and those buffers that ``path`` holds: a run may begin to balance with a bias."""
        weights = self._plain_weights()
        stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        buffers = {self._plain(name) for name, _ in self._model.named_buffers()}
        there = {n: value for n, value in weights.items() if n not in buffers or f"model.{n}" in stored}
        with reading(path):
            dcp.load({"model": there}, checkpoint_id=path, no_dist=not dist.is_initialized())
        self._set_weights(weights | there)

    def due(self, step: int) -> bool:
        """Whether ``step``, just done, is to be saved."""
        first = self._section.enable_first_step_checkpoint and step == 1
        return first or step == self._steps or step % self._section.interval == 0

    def save(self, step: int) -> None:
        """Save the present state as that of ``step``, in the background with async_mode once the one before is done."""
        self.wait()
        part = self._path(step).with_suffix(".part")
        if _is_first_rank():
            shutil.rmtree(part, ignore_errors=True)
        if dist.is_initialized():
            dist.barrier()
        begun = time.perf_counter()
        state = self._state()
        if self._section.async_mode == "async":
            self._writing = Future()
            written = dcp.async_save(_copy(state), checkpoint_id=part, process_group=self._group)
            written.add_done_callback(functools.partial(self._written, step, begun, self._writing))
        else:
            with writing(part):
                dcp.save(state, checkpoint_id=part, no_dist=not dist.is_initialized())
            self._publish(step, begun)
            if dist.is_initialized():
                dist.barrier()  # no rank goes on before the checkpoint can be found

    def wait(self) -> None:
        """Until a background save is complete and, on the first rank, has its name. Raises what it raised."""
        if self._writing is not None:
            published, self._writing = self._writing, None
            published.result()

    def _written(self, step: int, begun: float, published: Future[None], written: Future[Any]) -> None:
        """Publish a background save. What goes wrong is for ``wait``: an executor only logs what a callback raises."""
        try:
            with writing(self._path(step)):
                written.result()
            self._publish(step, begun)
        except BaseException as error:
            published.set_exception(error)
        else:
            published.set_result(None)

    def _state(self) -> dict[str, Any]:
        """Model, optimizer and parts, under plain names. Tensors are the live ones."""
        return {
            "model": self._plain_weights(),
            "optimizer": {self._plain_state(name): value for name, value in self._states().items()},
            "parts": {name: pickle.dumps(part.state_dict()) for name, part in self._parts.items()},
        }

    def _plain_weights(self) -> dict[str, Any]:
        found = get_model_state_dict(self._model)
        return {self._plain(name): self._plain_weight(value) for name, value in found.items()}

    def _set_weights(self, loaded: dict[str, Any]) -> None:
        names = get_model_state_dict(self._model)
        set_model_state_dict(self._model, {name: loaded[self._plain(name)] for name in names})

    def _states(self) -> dict[str, Any]:
        """ "state.<parameter>.<key>" and "param_groups.<parameter>.<key>"."""
        return get_optimizer_state_dict(self._model, self._optimizer, options=_OPTIONS)

    def _plain_state(self, name: str) -> str:
        kind, _, parameter = name.partition(".")
        return f"{kind}.{self._plain(parameter)}"

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def _publish(self, step: int, begun: float) -> None:
        """Give a complete checkpoint its name and delete those beyond keep_latest_k. The coordinating rank does it."""
        if not _is_first_rank():
            return
        path = self._path(step)
        if path.exists():  # of an earlier attempt that was continued from before this step
            path.rename(path.with_suffix(".old"))
        path.with_suffix(".part").rename(path)
        descriptor = os.open(self._folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        shutil.rmtree(path.with_suffix(".old"), ignore_errors=True)
        if keep := self._section.keep_latest_k:
            for old in complete_steps(self._folder)[:-keep]:
                (self._path(old) / ".metadata").unlink()  # from here on it is incomplete
                shutil.rmtree(self._path(old), ignore_errors=True)
        logger.info("Saved %s in %.1f s", path, time.perf_counter() - begun)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _copy(value: Any) -> Any:
    """A copy on the CPU that training cannot change: torch leaves tensors that are there already where they are."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone() if value.device.type == "cpu" else value.detach().cpu()
    return value
