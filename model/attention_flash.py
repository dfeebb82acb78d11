"""The flash-attn packages: FlashAttention-2 (flash-attn, a source build) and FlashAttention-4 (flash-attn-4, CuTe DSL).

Both are called through operators registered here, ``ablation_trainer::flash2_forward`` and so on, so that torch.compile
sees one node where a Python-driven kernel would break its graph, and selective checkpointing can keep its result. Their
own autograd functions are bypassed: blocks need the backward pass with the log-sum-exp of a whole row.

Documents become *variable-length* sequences: all tokens of the micro-batch in one row, and the bounds between them. The
bounds are padded with empty sequences to a length that the host knows, so nothing waits for the device.
"""

from typing import Any, NamedTuple, Protocol

import torch

from model.attention_blocks import BlockKernel, refuse

NAMESPACE = "ablation_trainer"

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Documents(NamedTuple):
    """Documents of a micro-batch as sequences of their own."""

    bounds: torch.Tensor
    """int32 (N + 1,): where each begins among the B * S tokens, then B * S; empty ones have equal bounds."""
    longest: int
    """No document is longer."""


class Package(Protocol):
    """Entry points of a package, without autograd.

    q, out, dout are (B, S, H, D) and k, v (B, S, H_kv, D); lse is float32 (B, H, S), by the natural logarithm. With
    bounds B is left out and S is all tokens.
    """

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor | None, longest: int, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse."""

    @staticmethod
    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bounds: torch.Tensor | None,
        longest: int,
        causal: bool,
    ) -> Grads:
        """Gradients of q, k, v, contiguous."""


class Flash2:
    """flash_attn.flash_attn_interface of flash-attn 2.8."""

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor | None, longest: int, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn import flash_attn_interface as package

        options = _flash2_options(q, causal) | {"return_softmax": False}
        if bounds is None:
            out, lse, *_ = package._flash_attn_forward(q, k, v, **options)
        else:
            out, lse, *_ = package._flash_attn_varlen_forward(q, k, v, bounds, bounds, longest, longest, **options)
        return out, lse

    @staticmethod
    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bounds: torch.Tensor | None,
        longest: int,
        causal: bool,
    ) -> Grads:
        from flash_attn import flash_attn_interface as package

        grads = _empty_grads(q, k, v)
        given = (dout, q, k, v, out, lse.contiguous(), *grads)
        options = _flash2_options(q, causal) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
        if bounds is None:
            package._flash_attn_backward(*given, **options)
        else:
            package._flash_attn_varlen_backward(*given, bounds, bounds, longest, longest, **options)
        return grads


def _flash2_options(q: torch.Tensor, causal: bool) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": q.shape[-1] ** -0.5,
        "causal": causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


class Flash4:
    """flash_attn.cute.interface of flash-attn-4 4.0.0b36. Scores are scaled by D ** -0.5 by default."""

    @staticmethod
    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor | None, longest: int, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn.cute import interface as package

        out, lse, *_ = package._flash_attn_fwd(
            q, k, v, causal=causal, return_lse=True, **_flash4_bounds(bounds, longest)
        )
        return out, lse

    @staticmethod
    def backward(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bounds: torch.Tensor | None,
        longest: int,
        causal: bool,
    ) -> Grads:
        from flash_attn.cute import interface as package

        dq, dk, dv = _empty_grads(q, k, v)
        package._flash_attn_bwd(
            q,
            k,
            v,
            out,
            dout,
            lse,
            causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq,
            dk=dk,
            dv=dv,
            **_flash4_bounds(bounds, longest),
        )
        return dq, dk, dv


def _flash4_bounds(bounds: torch.Tensor | None, longest: int) -> dict[str, Any]:
    if bounds is None:
        return {}
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _empty_grads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Grads:
    """Contiguous, whatever the strides of the inputs: a compiler is told so."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


def _register(name: str, package: type[Package]) -> None:
    """Register ``package`` as the operators ``<name>_forward`` and ``<name>_backward``, with shapes and autograd."""
    forward = torch.library.custom_op(
        f"{NAMESPACE}::{name}_forward",
        package.forward,
        mutates_args=(),
        schema="(Tensor q, Tensor k, Tensor v, Tensor? bounds, SymInt longest, bool causal) -> (Tensor, Tensor)",
    )
    backward = torch.library.custom_op(
        f"{NAMESPACE}::{name}_backward",
        package.backward,
        mutates_args=(),
        schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? bounds, SymInt longest,"
        " bool causal) -> (Tensor, Tensor, Tensor)",
    )

    @forward.register_fake
    def _(q: torch.Tensor, k: Any, v: Any, bounds: Any, longest: int, causal: bool) -> tuple[torch.Tensor, ...]:
        *batch, tokens, heads, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((*batch, heads, tokens), dtype=torch.float32)

    @backward.register_fake
    def _(dout: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Grads:
        return _empty_grads(q, k, v)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        q, k, v, bounds, ctx.longest, ctx.causal = inputs
        ctx.save_for_backward(q, k, v, *output, bounds)

    def differentiate(ctx: Any, dout: torch.Tensor, dlse: Any) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, bounds = ctx.saved_tensors
        return *backward(dout, q, k, v, out, lse, bounds, ctx.longest, ctx.causal), None, None, None

    forward.register_autograd(differentiate, setup_context=keep)


class FlashBlocks:
    """Block kernel of a package."""

    masks = False

    def __init__(self, name: str):
        self._forward = getattr(getattr(torch.ops, NAMESPACE), f"{name}_forward")
        self._backward = getattr(getattr(torch.ops, NAMESPACE), f"{name}_backward")

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        refuse(mask)
        return self._forward(q, k, v, None, 0, causal)

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
    ) -> Grads:
        refuse(mask)
        return self._backward(dout, q, k, v, out, lse, None, 0, causal)


class Flash:
    """Attention by one of the packages; bfloat16 on CUDA."""

    name: str
    blocks: BlockKernel | None

    def prepare(
        self,
        document_ids: torch.Tensor | None,
        document_starts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> Documents | None:
        """The documents as sequences; None without documents. Waits for the device if ``document_starts`` is None."""
        if document_ids is None:
            return None
        rows, length = document_ids.shape
        if document_starts is None:
            most = int(document_ids.max()) + 1
            ids = torch.arange(most, dtype=document_ids.dtype, device=document_ids.device).expand(rows, -1)
            document_starts = torch.searchsorted(document_ids.contiguous(), ids.contiguous(), out_int32=True)
        row = torch.arange(rows, dtype=torch.int32, device=document_ids.device)[:, None] * length
        bounds = torch.nn.functional.pad((document_starts + row).flatten(), (0, 1), value=rows * length)
        torch._dynamo.maybe_mark_dynamic(bounds, 0)  # its length changes with the documents; blocks compile once
        return Documents(bounds, length)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Documents | None) -> torch.Tensor:
        forward = getattr(getattr(torch.ops, NAMESPACE), f"{self.name}_forward")
        if mask is None:
            return forward(q, k, v, None, 0, True)[0]
        out, _ = forward(*(x.flatten(0, 1) for x in (q, k, v)), mask.bounds, mask.longest, True)
        return out.unflatten(0, q.shape[:2])


_register("flash2", Flash2)
_register("flash4", Flash4)


class FlashAttention2(Flash):
    """flash-attn 2."""

    name = "flash2"
    blocks: BlockKernel | None = FlashBlocks("flash2")


class FlashAttention4(Flash):
    """flash-attn-4."""

    name = "flash4"
    blocks: BlockKernel | None = FlashBlocks("flash4")
