"""Rules of the loss and of Liger's kernels, and what each loss needs of memory."""

from __future__ import annotations

from collections.abc import Iterator

from config.errors import ConfigError
from config.refusal import Said, compiled, compiles, pipelined, tensor_parallel, zero_bubble
from config.schema import Config
from config.shapes import ModelShape

BY_SWITCH = {"cross_entropy": "liger_cross_entropy", "fused_linear_cross_entropy": "liger_fused_linear"}
"""Switch of [liger] -> the loss.implementation that it stands for."""


def loss_implementation(config: Config) -> str:
    """``loss.implementation``, or what it is where it is unset."""
    asked = [name for switch, name in BY_SWITCH.items() if getattr(config.liger, switch)]
    return config.loss.implementation or (asked[0] if asked else "torch")


def liger_switches(config: Config) -> list[str]:
    """Full keys that ask for a kernel of Liger's, as they would be written."""
    asked = [f"liger.{name} = true" for name in vars(config.liger) if getattr(config.liger, name)]
    if config.loss.implementation in BY_SWITCH.values():
        asked.append(f'loss.implementation = "{config.loss.implementation}"')
    return asked


def loss_rules(config: Config, shape: ModelShape, said: Said) -> Iterator[str]:
    """What is wrong with [loss] and [liger], a sentence or two each."""
    on = [switch for switch in BY_SWITCH if getattr(config.liger, switch)]
    if len(on) == 2:
        yield f"{said('liger.cross_entropy')} with {said('liger.fused_linear_cross_entropy')}: a run has one loss."
    elif on and config.loss.implementation not in (None, BY_SWITCH[on[0]]):
        yield (
            f"{said(f'liger.{on[0]}')} with {said('loss.implementation')}: the switch stands for"
            f' "{BY_SWITCH[on[0]]}". Leave one of them out.'
        )
    found, gathered = loss_implementation(config), config.parallelism.disable_loss_parallel
    where = said(f"liger.{on[0]}" if on and config.loss.implementation is None else "loss.implementation")
    if tensor_parallel(config):
        degree = said("parallelism.tensor_parallel_degree")
        if found == "liger_fused_linear":
            yield (
                f"{where} with {degree}: the kernel wants the head's whole matrix, which is cut over the vocabulary."
                ' "row_chunked" and "vocab_chunked" combine what they find in each rank\'s part.'
            )
        if found == "liger_cross_entropy" and not gathered:
            yield (
                f"{where} with {degree}: the kernel wants whole rows of logits, which are cut over the vocabulary. Set"
                ' parallelism.disable_loss_parallel = true to gather them, or use "row_chunked".'
            )
        if found in ("row_chunked", "vocab_chunked") and gathered:
            yield (
                f"{where} with {said('parallelism.disable_loss_parallel')}: there are no logits to gather. Leave it"
                " false: each rank's part is combined."
            )
    if found == "liger_cross_entropy" and zero_bubble(config):
        yield (
            f"{where} with {said('parallelism.pipeline_parallel_schedule')}: the gradient is kept in place of the"
            " logits and scaled there once, and taking gradients of inputs and of weights apart comes twice. Use"
            ' "row_chunked" or another schedule.'
        )
    if config.loss.soft_cap and config.checkpoint.enable and config.checkpoint.last_save_in_hf:
        yield (
            f"{said('loss.soft_cap')} with {said('checkpoint.last_save_in_hf')}: {NO_SOFT_CAP}. Set one of them to"
            " its default."
        )


NO_SOFT_CAP = "no family of models that is exported has capped logits, so the export would be another model"


def loss_notes(config: Config, shape: ModelShape) -> Iterator[str]:
    """What is allowed and has no effect, a sentence each."""
    found, (copies, in_float32) = loss_implementation(config), _float32_logits(config, shape)
    if found == "torch" and not compiles(config, "loss") and in_float32 >= WORTH_A_NOTE:
        yield (
            f"logits are in memory {'once' if copies == 1 else 'three times'} in float32, {in_float32 / 2**30:.1f} GiB"
            " a micro-batch: the loss is torch's and not compiled."
            ' loss.implementation = "row_chunked" never holds them (docs/memory.md)'
        )
    if compiles(config, "loss") and found in BY_SWITCH.values():
        yield f'"loss" in compile.components has no effect: the loss is {found}, a kernel of its own'
    moe = shape.moe
    if config.liger.swiglu and moe and not moe.shared_dim and all(moe.has_experts(i) for i in range(shape.n_layers)):
        yield "liger.swiglu = true has no effect: every layer is experts alone, whose SwiGLU is theirs (moe.experts)"
    if any((config.liger.rms_norm, config.liger.rope, config.liger.swiglu)) and compiled(config):
        yield "Liger's kernels stay as they are in a compiled block: the compiler fuses nothing into them"


WORTH_A_NOTE = 4 * 2**30
"""Bytes."""


def _float32_logits(config: Config, shape: ModelShape) -> tuple[int, int]:
    """How often eager cross entropy holds a micro-batch's logits in float32, and the bytes of it. Ranks that share the
    vocabulary hold their columns once; where they gather them, each holds all.
    """
    section, training = config.parallelism, config.training
    rows = section.pipeline_parallel_microbatch_size if pipelined(config) else training.local_batch_size
    tokens = rows * training.seq_len // section.context_parallel_degree
    if tensor_parallel(config) and not section.disable_loss_parallel:
        return 1, 4 * tokens * shape.vocab_size // section.tensor_parallel_degree
    return 3, 3 * 4 * tokens * shape.vocab_size


def check_liger_on(config: Config, device: str) -> None:
    """ConfigError: a kernel of Liger's without a GPU. ``device``: "cpu" or "cuda"."""
    asked = liger_switches(config)
    if asked and device != "cuda":
        raise ConfigError(
            f"{', '.join(asked)}: Liger's kernels are Triton's, and this machine has no GPU. Leave them out here; what"
            ' saves memory on any device is loss.implementation = "row_chunked" or "vocab_chunked".'
        )


def liger_chunk(tokens: int, vocab: int, dim: int) -> int:
    """Rows of a chunk of liger-kernel 0.8.5's fused linear cross entropy: logits of about tokens x dim numbers."""
    rows = -(-tokens // -(-vocab // dim))
    return min(tokens, 1 << (rows - 1).bit_length())


def loss_peak_bytes(
    implementation: str,
    *,
    tokens: int,
    vocab: int,
    dim: int,
    compute_bytes: int = 2,
    weight_bytes: int = 2,
    chunk: int = 1,
    compiled: bool = False,
    shared: bool = False,
) -> int:
    """Peak of a head and its loss, forward and backward, beyond hidden states, the head's matrix and labels: what
    gradients of these two take is counted. Without soft cap and z-loss.

    Args:
        implementation: of ``loss.implementation``.
        tokens: rows of the hidden states.
        vocab: columns of the logits on this rank.
        compute_bytes: of a number in the compute dtype.
        weight_bytes: of a number of the head's matrix as the head has it: FSDP2 gathers it in the compute dtype,
            autocast leaves it float32.
        chunk: loss.rows_per_chunk or loss.columns_per_chunk.
        compiled: "loss" is in compile.components, by inductor.
        shared: other ranks hold other columns, and none gathers them.
    """
    c, w, wide = compute_bytes, weight_bytes, 4
    logits, by_hidden, matrix = tokens * vocab, tokens * dim, vocab * dim
    cast = c * matrix if c != w else 0  # the matrix in the compute dtype
    gradients = c * by_hidden + w * matrix
    temporary = 2 * c if compiled or c == wide else 2 * c + wide  # a logit, its wide copy and its gradient
    if implementation == "torch" and shared:
        return max(temporary * logits, c * logits + gradients) + cast
    if implementation == "torch" and not compiled:
        # log-softmax, its gradient and the logits', all wide; or the gradient by logits with those it becomes.
        return max(3 * wide * logits, c * logits + gradients) + cast
    if implementation == "torch":
        return max(2 * c * logits, c * logits + gradients) + cast  # inductor writes the gradient beside the logits
    if implementation == "liger_cross_entropy":
        return c * logits + gradients + cast  # logits are overwritten by their gradient
    if implementation == "row_chunked":
        kept = wide * matrix + c * by_hidden
        return kept + max(cast + temporary * chunk * vocab, gradients)
    if implementation == "vocab_chunked":
        return w * matrix + wide * by_hidden + temporary * chunk * tokens + (c * chunk * dim if cast else 0)
    rows = liger_chunk(tokens, vocab, dim)
    kept = wide * matrix + c * by_hidden
    return max(kept + cast + max(c * rows * vocab, c * matrix), c * (matrix + by_hidden) + gradients)
