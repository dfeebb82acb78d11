"""Keys of torchtitan 0.2.2 that the schema does not have: which load, which are translated, which are refused and why.

A torchtitan file of a supported model loads as it is. A key that would change nothing (its technique is off) is noted;
one that asks for something else is refused by name. A key leaves these tables on the day the schema gains it; a test
keeps the two apart and holds both against the list of torchtitan's keys.
"""

from __future__ import annotations

from typing import Any

from config.errors import ConfigError
from config.keys import all_keys, did_you_mean, shown

_LATER = "not available in this version"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "job.print_config": ((False,), "`python -m config show FILE` prints every value with its origin"),
    "job.save_config_file": (("",), "every run directory holds its configuration as config.toml"),
    "job.custom_config_module": (("",), "the configuration is config/schema.py; add the key there"),
    "metrics.save_for_all_ranks": ((False,), "metrics are reduced over all ranks and written once"),
    "metrics.enable_wandb": (
        (False,),
        "metrics go to TensorBoard and metrics.jsonl; there is no Weights & Biases logger",
    ),
    "model.print_after_conversion": ((False,), "there are no converters to print the model after"),
    "optimizer.early_step_in_backward": (
        (False,),
        "a step in backward cannot clip the global gradient norm; remove the key",
    ),
    "training.dtype": (
        ("float32",),
        "master weights stay float32; training.mixed_precision_param sets the compute dtype",
    ),
    "training.gc_debug": ((False,), "there is no collector debugging; training.gc_freq sets when it runs"),
    "training.dataloader.num_workers": ((0,), "data are prepared by one background thread; see data.prefetch_steps"),
    "parallelism.pipeline_parallel_schedule_csv": (
        ("",),
        "the order of a pipeline comes by name; see parallelism.pipeline_parallel_schedule",
    ),
    "parallelism.expert_parallel_comm_backend": (
        ("standard",),
        "DeepEP's kernels need NVSHMEM and a build of their own, and none is part of this project; set it to"
        ' "standard". moe.dispatcher = "all_to_all_dedup" sends a token once a rank, as DeepEP does',
    ),
    "parallelism.pipeline_parallel_expert_parallel_overlap": (
        (True, False),
        "a DualPipeV schedule runs the two passes of a pair one after the other",
    ),
    "checkpoint.initial_load_model_only": (
        (True,),
        "checkpoint.initial_load_path gives weights; a run is continued from its own run directory",
    ),
    "checkpoint.initial_load_in_hf_quantized": ((False,), "weights are read as they are; dequantise them first"),
    "checkpoint.last_save_model_only": ((True, False), "every checkpoint is whole, the last one too"),
    "checkpoint.exclude_from_loading": (
        ([],),
        "a checkpoint is loaded whole, or its weights alone by initial_load_path",
    ),
    "checkpoint.load_only": ((False,), "set checkpoint.interval above training.steps to save at the end alone"),
    "checkpoint.create_seed_checkpoint": ((False,), "initial weights are the same on every mesh by construction"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        ([], ["moe.router.gate"]),
        'the operators that are kept are fixed; see activation_checkpoint.selective_ac_option = "op"',
    ),
    "activation_checkpoint.early_stop": ((False,), "there is no such option here; remove the key"),
    "activation_checkpoint.visualize_memory_budget_pareto": ((False,), "there is no such picture here; remove the key"),
    "activation_checkpoint.preserve_rng_state": ((True, False), "no layer draws random numbers from torch's generator"),
    "activation_checkpoint.determinism_check": (("default",), "there is no such option here; remove the key"),
    "activation_checkpoint.debug": ((False,), "there is no such option here; remove the key"),
    "comm.trace_buf_size": ((0, 20000), "the flight recorder is left at torch's own settings (TORCH_FR_BUFFER_SIZE)"),
    "comm.mode": (("default",), "communication is always real; --job.dry_run checks a configuration without it"),
    "memory_estimation.enable": (
        (False,),
        "--job.dry_run prints the memory of parameters, gradients and optimizer states",
    ),
    "fault_tolerance.enable": ((False,), "there is no fault-tolerant training; an interrupted run is started again"),
    "experimental.custom_import": (("",), "nothing is imported by name; change the code instead"),
    "experimental.custom_args_module": (("",), "the configuration is config/schema.py; add the key there"),
    "validation.dataset": (
        (),
        "validation reads held-out documents of the training corpus (data.holdout_percent); remove the key",
    ),
    "validation.dataset_path": ((), "validation reads held-out documents of the training corpus; remove the key"),
    "validation.seq_len": ((), "validation uses training.seq_len; remove the key, or make it equal"),
    "validation.dataloader.num_workers": ((0,), "validation batches are prepared once and kept; remove the key"),
    "debug.moe_force_load_balance": ((False,), f"mixture of experts is {_LATER}; set it to false"),
}
"""Key -> (values that change nothing here and load with a note, why any other value is refused)."""

FOLLOWS: dict[str, str] = {
    **{
        f"{section}.dataloader.{name}": f"{section}.dataloader.num_workers"
        for section in ("training", "validation")
        for name in ("persistent_workers", "pin_memory", "prefetch_factor")
    },
    "checkpoint.enable_ft_dataloader_checkpoints": "fault_tolerance.enable",
    **{
        f"quantize.{name}": "model.converters"
        for name in (
            "linear.mx.mxfp8_dim1_cast_kernel_choice",
            "linear.mx.recipe_name",
            "linear.mx.filter_fqns",
            "grouped_mm.mx.recipe_name",
            "grouped_mm.mx.fqns",
        )
    },
    "comm.save_traces_folder": "comm.trace_buf_size",
    "comm.save_traces_file_prefix": "comm.trace_buf_size",
    "memory_estimation.disable_fake_mode": "memory_estimation.enable",
    **{
        f"fault_tolerance.{name}": "fault_tolerance.enable"
        for name in (
            "process_group",
            "process_group_timeout_ms",
            "replica_id",
            "group_size",
            "min_replica_size",
            "semi_sync_method",
        )
    },
}
"""Key -> the key that makes it matter, of REFUSED or the schema's. While that one changes nothing, as no value of
model.converters asks for mx here, any value of this one loads.
"""

TRANSLATED: dict[str, str] = {
    "training.dataset": "data.corpus, and for c4 data.name, data.subset and data.split",
    "training.dataset_path": "data.name of a Hugging Face data set, data.path of a text corpus",
    "model.tokenizer_path": "model.hf_assets_path",
    "parallelism.context_parallel_rotate_method": "parallelism.context_parallel_method",
    "parallelism.context_parallel_load_balancer": "parallelism.context_parallel_layout",
}
"""Key -> the keys of the schema that say the same."""

_CORPORA = ("python", "text", "hf", "mixture")
_DATASETS: dict[str, dict[str, str]] = {
    "c4": {"data.corpus": "hf", "data.name": "allenai/c4", "data.subset": "en", "data.split": "train"},
    "c4_validation": {"data.corpus": "hf", "data.name": "allenai/c4", "data.subset": "en", "data.split": "validation"},
    **{name: {"data.corpus": name} for name in _CORPORA},
}
_CONTEXT = {
    "parallelism.context_parallel_rotate_method": {"allgather": "allgather", "alltoall": "ring"},
    "parallelism.context_parallel_load_balancer": {"headtail": "zigzag"},
}
"""torchtitan's key -> its values, as values of the key in ``TRANSLATED``."""
_NO_C4_TEST = (
    'torchtitan\'s 2,000 test documents are not part of this project. Use another corpus (data.corpus = "python" needs'
    " no download), or point training.dataset_path at the folder tests/assets/c4_test of a torchtitan checkout."
)
_FLAVORS = {
    f"{flavor}_{kind}": (flavor, kind)
    for flavor, kinds in {"debugmodel": ("flex_attn", "varlen_attn"), "8B": ("flex", "varlen")}.items()
    for kind in kinds
}


def names() -> list[str]:
    """Every key of torchtitan 0.2.2 that is known here and not in the schema."""
    return [*TRANSLATED, *REFUSED, *FOLLOWS]


def is_known(full: str) -> bool:
    """Whether torchtitan 0.2.2 has this key and the schema does not."""
    return full in TRANSLATED or full in REFUSED or full in FOLLOWS


def translated(leaves: dict[str, Any], before: dict[str, Any], corpus: str, where: str) -> dict[str, tuple[Any, str]]:
    """What one layer's torchtitan keys say in keys of the schema: full key -> (value, torchtitan's key).

    ``before`` holds torchtitan's keys of the layers below, ``corpus`` the data.corpus so far. A data set that is
    unknown or not available is left to :func:`judged`, so that a higher layer may still replace it.

    Raises:
        ConfigError: the layer sets a key of the schema to something else than its torchtitan twin.
    """
    found: dict[str, tuple[Any, str]] = {}
    for full in leaves.keys() & TRANSLATED.keys():
        if not isinstance(leaves[full], str) or not leaves[full]:
            raise ConfigError(f"{where}: {full} = {shown(leaves[full])}: expected a name, as a string")
    if "model.tokenizer_path" in leaves:
        found["model.hf_assets_path"] = (leaves["model.tokenizer_path"], "model.tokenizer_path")
    for full in leaves.keys() & _CONTEXT.keys():
        if leaves[full] in _CONTEXT[full]:
            found[TRANSLATED[full]] = (_CONTEXT[full][leaves[full]], full)
    if "training.dataset" in leaves or "training.dataset_path" in leaves:
        name = leaves.get("training.dataset", before.get("training.dataset", corpus))
        for full, value in _DATASETS.get(name, {}).items():
            found[full] = (value, "training.dataset")
        path = leaves.get("training.dataset_path", before.get("training.dataset_path"))
        if path and name in ("python", "mixture"):
            raise ConfigError(
                f"{where}: training.dataset_path = {shown(path)}: the corpus {shown(name)} takes no path; see data.*"
            )
        if path:
            if name == "c4_test":
                found["data.corpus"] = ("hf", "training.dataset")
            found["data.path" if name == "text" else "data.name"] = (path, "training.dataset_path")
    for full, (value, twin) in found.items():
        if leaves.get(full, value) != value:
            raise ConfigError(
                f"{where}: {twin} = {shown(leaves.get(twin, before.get(twin)))} means {full} = {shown(value)},"
                f" but {full} = {shown(leaves[full])} is set as well. Remove one of them."
            )
    return found


def judged(foreign: dict[str, Any], origins: dict[str, str], values: dict[str, Any]) -> list[str]:
    """Judge torchtitan's keys once everything is merged. ``values`` holds the schema's keys that were set.

    Returns:
        Notes: which keys were read and change nothing.

    Raises:
        ConfigError: every key that asks for what is not here, a line each.
    """
    broken, quiet = [], []
    for full, value in foreign.items():
        reason = _refusal(full, value, foreign, values)
        if reason:
            broken.append(f"{origins[full]}: {full} = {shown(value)}: {reason}")
        elif full not in TRANSLATED or value not in _CONTEXT.get(full, [value]):
            quiet.append(full)
    flavor = values.get("model.flavor")
    if values.get("model.name", "llama3") == "llama3" and flavor in _FLAVORS:
        plain, kind = _FLAVORS[flavor]
        broken.append(
            f"{origins['model.flavor']}: model.flavor = {shown(flavor)}: attention is not part of a flavor here. Use"
            f' "{plain}" with data.document_mask = true, which {kind.split("_")[0]} attention is there for.'
        )
    if broken:
        raise ConfigError("\n".join(broken))
    return [f"torchtitan keys that change nothing here: {', '.join(quiet)}"] if quiet else []


def _refusal(full: str, value: Any, foreign: dict[str, Any], values: dict[str, Any]) -> str:
    """Why this value cannot be, or nothing."""
    if full == "training.dataset" and value not in _DATASETS:
        if value == "c4_test":
            return "" if foreign.get("training.dataset_path") else _NO_C4_TEST
        guess = did_you_mean(str(value), _DATASETS)
        return f"unknown data set{guess}; known: {', '.join(_DATASETS)}. Others are reached through [data]."
    if full in _CONTEXT and value not in _CONTEXT[full]:
        if values.get("parallelism.context_parallel_degree", 1) == 1:
            return ""
        return f"there is no such option here; {TRANSLATED[full]} says the same: {', '.join(_CONTEXT[full].values())}"
    if full not in REFUSED:
        return ""
    harmless, reason = REFUSED[full]
    if full.startswith("validation."):
        seq_len = values.get("training.seq_len", all_keys()["training.seq_len"].default)
        if not values.get("validation.enable", False) or (full == "validation.seq_len" and value == seq_len):
            return ""
    return "" if any(type(value) is type(h) and value == h for h in harmless) else reason
