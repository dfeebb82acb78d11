"""Rules between keys, checked before anything is touched.

Those that need the number of ranks are in config/world.py, those that look at the file system in config/paths.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import PurePath
from typing import Any

from config.attention import attention_rules
from config.errors import ConfigError
from config.flavors import ModelShape, resolve_shape
from config.keys import all_keys, checked, did_you_mean, shown, unknown_key, value_of
from config.layouts import expert_notes, layout_notes, layout_rules
from config.loss import loss_implementation, loss_notes, loss_rules
from config.moe_rules import moe_notes, moe_rules
from config.pipeline import pipeline_rules
from config.precision import precision_notes, precision_rules
from config.profiling_rules import profiling_notes, profiling_rules
from config.schema import Config

COMPILE_BACKENDS = ("inductor", "eager", "aot_eager", "aot_eager_decomp_partition", "cudagraphs")
"""Backends of torch.compile that ship with torch and can train."""

_CORPUS_NEEDS = {"text": "path", "hf": "name", "mixture": "sources"}
SOURCE_KEYS = ("corpus", "path", "name", "subset", "split", "text_field", "roots")
"""Keys of [data] that a table of data.sources may hold, beside its weight."""

Said = Callable[[str], str]


def effective(config: Config) -> dict[str, tuple[Any, str]]:
    """Full key -> (value, rule) for each key that is unset and follows from another: shape, seeds, schedule."""
    shape, debug = resolve_shape(config.model, config.moe), config.debug
    found: dict[str, tuple[Any, str]] = {}
    for name, section, of in (("model", config.model, shape), ("moe", config.moe, shape.moe)):
        for f in fields(section):
            if of is not None and hasattr(of, f.name) and getattr(section, f.name) is None:
                found[f"{name}.{f.name}"] = (getattr(of, f.name), f"flavor {config.model.flavor}")
    if config.model.head_dim is None and (config.model.dim is not None or config.model.n_heads is not None):
        found["model.head_dim"] = (shape.head_dim, "dim / n_heads")
    if config.lr_scheduler.total_steps is None:
        found["lr_scheduler.total_steps"] = (config.training.steps, "training.steps")
    if shape.moe is not None and config.moe.coeff_decay != "constant" and config.moe.coeff_decay_steps is None:
        found["moe.coeff_decay_steps"] = (config.training.steps, "training.steps")
    if config.loss.implementation is None:
        found["loss.implementation"] = (loss_implementation(config), "[liger]")
    for name in ("init_seed", "data_seed", "noise_seed"):
        if getattr(debug, name) is None:
            found[f"debug.{name}"] = (debug.seed, "debug.seed")
    return found


def check(config: Config, origins: dict[str, str]) -> list[str]:
    """Check every rule between keys that needs neither a device nor the file system.

    Returns:
        Notes: what is allowed and may surprise, a sentence each.

    Raises:
        ConfigError: every broken rule, a line each, with the numbers, where they came from and the fix.
    """
    shape = resolve_shape(config.model, config.moe)
    follows = effective(config)

    def said(full: str) -> str:
        value, origin = follows.get(full, (value_of(config, full), origins.get(full, "")))
        return f"{full} = {shown(value)} ({origin})" if origin else f"{full} = {shown(value)}"

    broken = [
        *_model_rules(config, shape, said),
        *attention_rules(config, shape, said),
        *moe_rules(config, shape, said),
        *layout_rules(config, shape, said),
        *_step_rules(config, said),
        *_data_rules(config, shape, said),
        *pipeline_rules(config, shape, None, said),
        *_option_rules(config, said),
        *profiling_rules(config, said),
        *precision_rules(config, shape, said),
        *loss_rules(config, shape, said),
    ]
    if broken:
        raise ConfigError("\n".join(broken))
    return [
        *layout_notes(config),
        *_schedule_notes(config),
        *_moe_notes(config, shape),
        *moe_notes(config, shape),
        *expert_notes(config, shape),
        *profiling_notes(config),
        *precision_notes(config, shape),
        *loss_notes(config, shape),
    ]


def _model_rules(config: Config, shape: ModelShape, said: Said) -> Iterator[str]:
    if config.model.head_dim is None and shape.dim % shape.n_heads:
        yield f"{said('model.dim')} is not divisible by {said('model.n_heads')}. Change one, or set model.head_dim."
    elif shape.head_dim % 2:
        yield f"{said('model.head_dim')} is odd; rotary embeddings turn pairs. Choose an even head_dim."
    if shape.n_heads % shape.n_kv_heads:
        yield (
            f"{said('model.n_heads')} is not divisible by {said('model.n_kv_heads')}."
            " Each key and value head serves n_heads / n_kv_heads query heads: choose a divisor of n_heads."
        )
    if config.training.seq_len > shape.max_seq_len:
        yield (
            f"{said('training.seq_len')} is longer than the model allows: {said('model.max_seq_len')}."
            " Shorten seq_len, or raise model.max_seq_len."
        )


def _step_rules(config: Config, said: Said) -> Iterator[str]:
    size, local = config.training.global_batch_size, config.training.local_batch_size
    if size == 0:
        yield f"{said('training.global_batch_size')}: must be at least 1, or -1 (local batch x data-parallel degree)"
    elif size > 0 and size % local:
        yield (
            f"{said('training.global_batch_size')} is not divisible by {said('training.local_batch_size')}."
            f" Nearest that are: {', '.join(str(n) for n in _multiples_around(size, local))}."
        )
    if config.parallelism.data_parallel_shard_degree == 0:
        yield f"{said('parallelism.data_parallel_shard_degree')}: must be at least 1, or -1 for the ranks left over"
    if config.validation.steps == 0:
        yield f"{said('validation.steps')}: must be at least 1, or -1 for all that is held out"
    if config.validation.enable and config.data.holdout_percent == 0:
        yield (
            f"{said('validation.enable')} needs held-out documents, and {said('data.holdout_percent')}."
            " Set data.holdout_percent = 5, or validation.enable = false."
        )


def _data_rules(config: Config, shape: ModelShape, said: Said) -> Iterator[str]:
    data = config.data
    needed = _CORPUS_NEEDS.get(data.corpus)
    if needed and not getattr(data, needed):
        yield f"{said('data.corpus')} needs data.{needed}, which is empty."
    if data.corpus == "mixture":
        for number, source in enumerate(data.sources, start=1):
            yield from _source_rules(source, f"data.sources, table {number}")
    streams = data.corpus == "hf" or any(source.get("corpus") == "hf" for source in data.sources)
    if data.packing != "split_fill" and streams:
        yield (
            f'{said("data.packing")} with a corpus "hf": a stream is read in order, and has no epoch whose documents'
            ' could be put together. Use "split_fill", or a corpus "text" of the same files.'
        )
    kind = tokenizer_kind(config)
    if kind == "file" and not config.model.hf_assets_path:
        yield f"{said('data.tokenizer')} needs model.hf_assets_path, the folder with tokenizer.json."
    if kind == "bytes" and shape.vocab_size < 257:
        yield f"{said('model.vocab_size')} is smaller than the 257 tokens of the bytes tokenizer."
    if kind == "bpe" and data.tokenizer_vocab_size > shape.vocab_size:
        yield (
            f"{said('data.tokenizer_vocab_size')} is larger than {said('model.vocab_size')}: some tokens would have no"
            " embedding. Lower data.tokenizer_vocab_size, or raise model.vocab_size."
        )


def tokenizer_kind(config: Config) -> str:
    """What ``data.tokenizer = "auto"`` stands for: "file" if model.hf_assets_path is set, else "bpe"."""
    if config.data.tokenizer != "auto":
        return config.data.tokenizer
    return "file" if config.model.hf_assets_path else "bpe"


def _source_rules(source: dict[str, Any], where: str) -> Iterator[str]:
    """One table of a mixture: the keys of [data] that name a corpus, each of its type, and a weight."""
    for name, value in source.items():
        if name == "weight":
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                yield f"{where}: weight = {shown(value)}: expected a number above 0"
        elif name not in SOURCE_KEYS:
            known = [f"data.{n}" for n in (*SOURCE_KEYS, "weight")]
            yield f"{where}: {name}: {unknown_key(f'data.{name}', known)}"
        else:
            try:
                checked(all_keys()[f"data.{name}"], value)
            except ValueError as error:
                yield f"{where}: {name} = {shown(value)}: {error}"
    corpus = source.get("corpus")
    if corpus is None or "weight" not in source:
        missing = "corpus" if corpus is None else "weight"
        yield f'{where}: {missing} is missing; a table looks like {{ corpus = "text", path = "...", weight = 1.0 }}'
    elif corpus == "mixture":
        yield f'{where}: corpus = "mixture": a mixture does not nest; list its sources here.'
    elif (needed := _CORPUS_NEEDS.get(corpus)) and not source.get(needed):
        yield f"{where}: corpus = {shown(corpus)} needs {needed}."


def _option_rules(config: Config, said: Said) -> Iterator[str]:
    for name in ("beta1", "beta2"):
        if config.optimizer.name != "SGD" and getattr(config.optimizer, name) == 1.0:
            yield f"{said(f'optimizer.{name}')}: must be below 1, or the moment never moves."
    option = config.activation_checkpoint.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        where = said("activation_checkpoint.selective_ac_option")
        yield f'{where}: expected "op", or a whole number of at least 1 as text, such as "2"'
    if config.compile.backend not in COMPILE_BACKENDS:
        guess, choices = did_you_mean(config.compile.backend, COMPILE_BACKENDS), ", ".join(map(shown, COMPILE_BACKENDS))
        yield f"{said('compile.backend')}: unknown backend{guess}; known: {choices}"
    if config.compile.enable and not config.compile.components:
        yield f"{said('compile.enable')}, but compile.components is empty. Name some, or set compile.enable = false."
    folder = PurePath(config.metrics.save_tb_folder)
    if not folder.parts or folder.is_absolute() or ".." in folder.parts:
        yield f'{said("metrics.save_tb_folder")}: expected a folder inside the run directory, such as "tb".'
    if config.checkpoint.initial_load_in_hf and not config.checkpoint.initial_load_path:
        yield f"{said('checkpoint.initial_load_in_hf')} needs checkpoint.initial_load_path, the Hugging Face folder."
    if not config.job.dump_folder:
        yield f'{said("job.dump_folder")}: expected a folder, such as "outputs".'


def _schedule_notes(config: Config) -> Iterator[str]:
    schedule = config.lr_scheduler
    total = schedule.total_steps or config.training.steps
    if schedule.warmup_steps >= total:
        yield (
            f"lr_scheduler.warmup_steps = {schedule.warmup_steps} fills all {total} steps of the schedule:"
            " the rate rises to the end and never decays"
        )
    elif schedule.decay_ratio is not None and schedule.warmup_steps + round(total * schedule.decay_ratio) > total:
        yield (
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio} of {total} steps does not fit after"
            f" {schedule.warmup_steps} steps of warm-up: the decay takes the {total - schedule.warmup_steps} left"
        )
    if total < config.training.steps:
        yield (
            f"lr_scheduler.total_steps = {total} is shorter than training.steps = {config.training.steps}:"
            f" the last {config.training.steps - total} steps stay at the final rate"
        )


def _moe_notes(config: Config, shape: ModelShape) -> Iterator[str]:
    changed = [
        k.name for k in all_keys().values() if k.name.startswith("moe.") and value_of(config, k.name) != k.default
    ]
    if shape.moe is None and changed:
        verb = "has" if len(changed) == 1 else "have"
        yield f"{', '.join(changed)} {verb} no effect: flavor {config.model.flavor} has no experts"


def _multiples_around(size: int, unit: int) -> list[int]:
    below = size // unit * unit
    return [n for n in (below, below + unit) if n > 0]
