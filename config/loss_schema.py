"""Keys of the loss, and of Liger's kernels. See config/schema.py for how a schema is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from config.field import key


@dataclass
class Loss:
    implementation: (
        Literal["torch", "row_chunked", "vocab_chunked", "liger_cross_entropy", "liger_fused_linear"] | None
    ) = None
    """How head and cross entropy are computed (docs/memory.md). Unset: "torch", or as [liger] says."""
    rows_per_chunk: int = key(1024, minimum=1, parent="loss.implementation", parent_values=("row_chunked",))
    """Tokens whose logits are in memory at a time."""
    columns_per_chunk: int = key(8192, minimum=1, parent="loss.implementation", parent_values=("vocab_chunked",))
    """Entries of the vocabulary whose logits are in memory at a time."""
    z_loss_coeff: float = key(0.0, minimum=0.0)
    """Weight of the squared log of the softmax's denominator. In the gradient; the loss that is logged is without."""
    soft_cap: float = key(0.0, minimum=0.0)
    """c: logits become c x tanh(logits / c), in generation too. 0: they stay as they are."""


@dataclass
class Liger:
    rms_norm: bool = False
    """RMSNorm by Liger's kernel, of all norms."""
    rope: bool = False
    """Rotary embedding of queries and keys by Liger's kernel."""
    swiglu: bool = False
    """silu(gate) x up by Liger's kernel, in dense feed-forward layers and shared experts."""
    cross_entropy: bool = False
    """Cross entropy of the logits by Liger's kernel: loss.implementation is then "liger_cross_entropy"."""
    fused_linear_cross_entropy: bool = False
    """Head and cross entropy by Liger's fused kernel: loss.implementation is then "liger_fused_linear"."""
