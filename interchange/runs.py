"""What a training run asks of Hugging Face folders: weights to begin with, and an export at its end."""

from __future__ import annotations

import logging
from pathlib import Path

from config.flavors import resolve_shape
from config.schema import Config
from interchange.export import Ranks, export_checkpoint
from interchange.families import family_of
from interchange.matching import check_same, check_sizes
from interchange.weights import CheckpointWeights, HuggingFaceWeights
from trainer.checkpoint import step_to_continue
from trainer.checkpoint_files import check_files
from trainer.run_directory import TOKENIZER

logger = logging.getLogger(__name__)


def check_interchange(config: Config) -> None:
    """That the checkpoint a run goes on from is there and whole, or what it begins with holds its model; and that a
    family has the model it is to export.

    Raises:
        ConfigError: otherwise, a line a reason.
    """
    section, shape = config.checkpoint, resolve_shape(config.model, config.moe)
    if not section.enable:
        return
    if step := _step(config):
        check_files(Path(config.job.run_dir) / section.folder / f"step-{step}")
    elif section.initial_load_in_hf:
        check_same(section.initial_load_path, HuggingFaceWeights(section.initial_load_path).shape, shape)
    elif section.initial_load_path:
        check_sizes(section.initial_load_path, CheckpointWeights(section.initial_load_path).sizes(), shape)
    if section.last_save_in_hf:
        family_of(shape, config.moe)


def _step(config: Config) -> int:
    """That of the checkpoint in the run directory to go on from, 0 if there is none. Raises as ``step_to_continue``."""
    section, run_dir = config.checkpoint, config.job.run_dir
    return step_to_continue(Path(run_dir) / section.folder if run_dir else None, section)


def first_weights(config: Config) -> HuggingFaceWeights | None:
    """The folder whose weights the run begins with. None: they are drawn, or the run goes on and has its own."""
    section = config.checkpoint
    if not (section.enable and section.initial_load_in_hf) or _step(config):
        return None
    logger.info("Weights from %s", section.initial_load_path)
    return HuggingFaceWeights(section.initial_load_path)


def export_last(config: Config, run_dir: Path, ranks: Ranks) -> None:
    """Write the run's last checkpoint as the folder step-<n>-hf beside it, by all ranks together.

    One that is there was completed by an attempt that was killed right after, and stays.
    """
    last = run_dir / config.checkpoint.folder / f"step-{config.training.steps}"
    out = last.with_name(f"{last.name}-hf")
    there = out.exists()
    ranks.barrier()  # all have looked before one writes
    if not there:
        export_checkpoint(
            config, last, out, tokenizer=run_dir / TOKENIZER, dtype=config.checkpoint.export_dtype, ranks=ranks
        )
        logger.info("Exported %s", out)
