"""What ring and all-gather attention share: kernels by name, merging blocks, and operators that torch can trace.

Each is a pair of operators of its own, ``ablation_trainer::<name>`` and ``..._backward``, which torch.compile takes as
one node (no graph break at a message) and selective checkpointing as one operator. Operators take plain values, so
process groups and kernels go by name.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import _resolve_process_group as group_named

from parallelisms.context_layout import Block

__all__ = ["KERNELS", "Merged", "add_gradients", "group_named", "operator", "rows", "wide"]


class BlockKernel(Protocol):
    """Attention on a block of queries and keys. model/attention_blocks.py says what each method must do."""

    masks: bool

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


KERNELS: dict[str, BlockKernel] = {}
"""Kernels by the name that operators are given."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums over blocks are kept in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


class Merged:
    """Output of queries ``q`` (B, S, H, D) over the blocks seen so far.

    The first block of a query must hold a key it sees, as its own place is one: its sums stay finite from then on.
    """

    def __init__(self, q: torch.Tensor):
        self.dtype, sums = q.dtype, wide(q.dtype)
        self.out = torch.zeros_like(q, dtype=sums, memory_format=torch.contiguous_format)
        self.lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=sums, device=q.device)

    def add(self, out: torch.Tensor, lse: torch.Tensor, queries: slice) -> None:
        """Join the output (B, Sq, H, D) and log-sum-exp (B, H, Sq) of a block of some queries."""
        before = self.lse[:, :, queries]
        both = torch.logaddexp(before, lse)
        kept, new = ((x - both).exp().transpose(1, 2).unsqueeze(-1) for x in (before, lse))  # (B, Sq, H, 1)
        self.out[:, queries].mul_(kept).addcmul_(out.to(self.out.dtype), new)
        before.copy_(both)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output in the dtype of the queries, and lse."""
        return self.out.to(self.dtype), self.lse


def rows(x: torch.Tensor, places: slice) -> torch.Tensor:
    """Some places of (B, S, ...), contiguous, as not every kernel takes strides; no copy where B is 1."""
    return x[:, places].contiguous()


def add_gradients(
    compute: BlockKernel,
    dout: torch.Tensor,
    q: torch.Tensor,
    held: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block: Block,
    mask: torch.Tensor | None,
    dq: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of one block and add those of its queries to ``dq``.

    Args:
        compute: the kernel.
        dout, q, out: (B, S, H, D); lse: (B, H, S), of whole rows.
        held: keys and values (2, B, Sk, H_kv, D).
        mask: of the block, as its kernel takes it.
        dq: (B, S, H, D), changed in place.

    Returns:
        What the block adds to the gradients of the keys and of the values at its places.
    """
    mine, dk, dv = compute.backward(
        rows(dout, block.q),
        rows(q, block.q),
        rows(held[0], block.k),
        rows(held[1], block.k),
        rows(out, block.q),
        lse[:, :, block.q].contiguous(),
        block.causal,
        mask,
    )
    dq[:, block.q] += mine
    return dk, dv


def operator(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make an attention operator with a gradient.

    Args:
        forward: (q, k, v, documents, causal, layout, kernel, group) -> (out, lse).
        backward: (dout, q, k, v, out, lse, documents, causal, layout, kernel, group) -> (dq, dk, dv).

    Both are annotated with types that ``torch.library.custom_op`` reads.
    """
    run = torch.library.custom_op(f"ablation_trainer::{name}", forward, mutates_args=())
    run_backward = torch.library.custom_op(f"ablation_trainer::{name}_backward", backward, mutates_args=())

    @run.register_fake
    def _(q: torch.Tensor, *others: Any) -> Any:
        batch, length, heads, _ = q.shape
        return q.new_empty(q.shape), q.new_empty(batch, heads, length, dtype=wide(q.dtype))

    @run_backward.register_fake
    def _(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Any:
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        q, k, v, documents, *ctx.plain = inputs
        ctx.save_for_backward(q, k, v, *output, documents)

    def differentiate(ctx: Any, dout: torch.Tensor, _: Any) -> Any:
        q, k, v, out, lse, documents = ctx.saved_tensors
        gradients = run_backward(dout.contiguous(), q, k, v, out, lse, documents, *ctx.plain)
        return *gradients, None, None, None, None, None

    run.register_autograd(differentiate, setup_context=keep)
    return run
