"""Rows of the memory table: what is run, on one GPU, and in which order if time is short.

``fit`` rows determine the coefficients of config/estimate.py, ``check`` rows and the whole ``switches`` set test them
unseen. A switch's row differs from its base in that switch and in what the switch needs. Rows of one set are measured
in this order, and a set's base again whenever the session is another one (benchmarks/memory_table.py).

Dense 8B has 120 GiB of float32 weights, gradients and AdamW states on one GPU, which leaves no room to switch anything
off. Its base has bfloat16 moments, 90 GiB; the rows of the moments' dtype say what they have instead. MoE 7B has 102
GiB and takes two micro-batches a step: activations then come on top of gradients, as wherever steps are accumulated.
"""

from __future__ import annotations

from dataclasses import dataclass

DENSE_1B, DENSE_8B = "benchmarks/configs/dense_1b.toml", "benchmarks/configs/dense_8b.toml"
MOE_7B, DEBUG = "benchmarks/configs/moe_7b.toml", "benchmarks/configs/debug.toml"

FULL = ("--activation_checkpoint.mode", "full")
SELECTIVE = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option")
BUDGET = ("--activation_checkpoint.mode", "memory_budget", "--activation_checkpoint.memory_budget", "0.5")
OFFLOAD = ("--activation_checkpoint.offload", "true")
EAGER = ("--compile.enable", "false")
LIGER_BLOCKS = ("--liger.rms_norm", "true", "--liger.rope", "true", "--liger.swiglu", "true")
COMPILED_UPDATE = ("--compile.components", '["model", "loss", "optimizer"]')
FLOAT8 = ("--model.converters", '["quantize.linear.float8"]')
FLOAT8_EXPERTS = (
    "--model.converters", '["quantize.grouped_mm.float8"]', "--quantize.grouped_mm.float8.fqns", '["experts"]',
)  # fmt: skip
BY_CHANCE = ("--optimizer.stochastic_rounding", "true")
BFLOAT16_STATES = ("--optimizer.state_dtype", "bfloat16")


def loss(name: str) -> tuple[str, ...]:
    """Words that choose loss.implementation."""
    return ("--loss.implementation", name)


def batch(sequences: int, micro_batches: int = 1) -> tuple[str, ...]:
    """Words for steps of ``micro_batches``, each of ``sequences``."""
    step = str(sequences * micro_batches)
    return ("--training.local_batch_size", str(sequences), "--training.global_batch_size", step)


@dataclass(frozen=True)
class Row:
    """One run. ``words`` are train.py's; the run is short, so they come on top of HASTE."""

    name: str
    config: str
    words: tuple[str, ...]
    what: str
    base: str = ""
    """Row of the same set that it is compared with; "" for a base, and outside of ``switches``."""


HASTE = (
    "--data.tokenizer", "bytes", "--validation.enable", "false", "--metrics.enable_tensorboard", "false",
    "--lr_scheduler.warmup_steps", "2", "--training.gc_freq", "1000",
)  # fmt: skip
"""Nothing of it is seen in memory of the GPU; the model keeps its vocabulary."""


def _switches(
    prefix: str, config: str, common: tuple[str, ...], rows: list[tuple[str, tuple[str, ...], str]]
) -> list[Row]:
    base = f"{prefix}_base"
    return [
        Row(f"{prefix}_{name}", config, (*common, *words), what, "" if name == "base" else base)
        for name, words, what in rows
    ]


_8B = _switches(
    "dense_8b",
    DENSE_8B,
    batch(1),
    [
        ("base", BFLOAT16_STATES, "compiled, no checkpointing, torch's loss, bfloat16 moments"),
        ("full", (*BFLOAT16_STATES, *FULL), "checkpointing: every block"),
        ("row_chunked", (*BFLOAT16_STATES, *loss("row_chunked")), "loss: row-chunked"),
        ("float32_states", (*FULL, *loss("vocab_chunked")), "float32 moments, full checkpointing, vocabulary-chunked"),
        ("op", (*BFLOAT16_STATES, *SELECTIVE, "op"), "checkpointing: by operator"),
        ("eager", (*BFLOAT16_STATES, *EAGER, *FULL), "not compiled, with full checkpointing"),
        ("state_offload", ("--optimizer.state_offload", "true"), "float32 moments in CPU memory"),
        ("float8", (*BFLOAT16_STATES, *FLOAT8), "float8 linear layers, tensorwise"),
        ("offload", (*BFLOAT16_STATES, *OFFLOAD), "activations in CPU memory"),
        ("budget", (*BFLOAT16_STATES, *BUDGET), "checkpointing: memory budget 0.5"),
        ("every_2nd", (*BFLOAT16_STATES, *SELECTIVE, "2"), "checkpointing: every second block"),
        ("liger_fused", (*BFLOAT16_STATES, *loss("liger_fused_linear")), "loss: Liger's fused linear"),
        ("vocab_chunked", (*BFLOAT16_STATES, *loss("vocab_chunked")), "loss: vocabulary-chunked"),
        ("liger_blocks", (*BFLOAT16_STATES, *LIGER_BLOCKS), "Liger's RMSNorm, RoPE, SwiGLU"),
        ("liger_loss", (*BFLOAT16_STATES, *loss("liger_cross_entropy")), "loss: Liger's cross entropy"),
        ("flash4", (*BFLOAT16_STATES, "--attention.backend", "flash4"), "attention: FlashAttention-4"),
        ("sdpa_cudnn", (*BFLOAT16_STATES, "--attention.backend", "sdpa_cudnn"), "attention: cuDNN"),
        ("compiled_update", (*BFLOAT16_STATES, *COMPILED_UPDATE), "AdamW's update compiled"),
        ("stochastic", (*BFLOAT16_STATES, *COMPILED_UPDATE, *BY_CHANCE), "the same, moments rounded by chance"),
    ],
)  # fmt: skip

_7B = _switches(
    "moe_7b",
    MOE_7B,
    batch(2, 2),
    [
        ("base", (), "compiled, no checkpointing, torch's loss, float32 moments"),
        ("full", FULL, "checkpointing: every block"),
        ("experts", ("--activation_checkpoint.mode", "experts"), "checkpointing: all but experts"),
        ("bfloat16_states", BFLOAT16_STATES, "bfloat16 moments"),
        ("eager", EAGER, "not compiled"),
        ("state_offload", ("--optimizer.state_offload", "true"), "moments in CPU memory"),
        ("op", (*SELECTIVE, "op"), "checkpointing: by operator"),
        ("quack", ("--moe.experts", "quack"), "experts: quack's kernels"),
        ("row_chunked", loss("row_chunked"), "loss: row-chunked"),
        ("offload", OFFLOAD, "activations in CPU memory"),
        ("liger_fused", loss("liger_fused_linear"), "loss: Liger's fused linear"),
        ("float8", FLOAT8_EXPERTS, "float8 experts"),
    ],
)

ROWS: dict[str, list[Row]] = {
    "fit": [
        Row("fit_1b_b4", DENSE_1B, batch(4), "dense 1B, 4 sequences"),
        Row("fit_1b_b2_eager", DENSE_1B, (*batch(2), *EAGER), "dense 1B, 2 sequences, not compiled"),
        Row("fit_1b_b8_full", DENSE_1B, (*batch(8), *FULL), "dense 1B, 8 sequences, every block checkpointed"),
        Row("fit_1b_b8_row", DENSE_1B, (*batch(8), *loss("row_chunked")), "dense 1B, 8 sequences, row-chunked loss"),
        Row("fit_8b_8layers", DENSE_8B, (*batch(2), "--model.n_layers", "8"), "dense 8B with 8 layers, 2 sequences"),
        Row("fit_moe_4layers", MOE_7B, (*batch(4), "--model.n_layers", "4"), "MoE 7B with 4 layers, 4 sequences"),
        Row("fit_moe_4layers_eager", MOE_7B, (*batch(4), "--model.n_layers", "4", *EAGER), "the same, not compiled"),
        Row("fit_1b_b4_op", DENSE_1B, (*batch(4), *SELECTIVE, "op"), "dense 1B, 4 sequences, checkpointed by operator"),
    ],
    "check": [
        Row("check_1b_accumulates", DENSE_1B, batch(4, 2), "dense 1B, two micro-batches of 4"),
        Row("check_1b_b6_2nd", DENSE_1B, (*batch(6), *SELECTIVE, "2", *loss("vocab_chunked")), "dense 1B, 6 sequences"),
    ],
    "switches": [*_8B[:6], *_7B[:6], *_8B[6:12], *_7B[6:], *_8B[12:]],
    "debug": _switches(
        "debug", DEBUG, batch(2), [("base", (), "the debug model"), ("full", FULL, "checkpointing: every block")]
    ),
}  # fmt: skip
"""``debug`` is for tests: whether rows work."""
