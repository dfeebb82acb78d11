"""Attention by ``torch.nn.functional.scaled_dot_product_attention`` and the kernels behind it."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from config.errors import ConfigError
from model.attention_blocks import BlockKernel, ReferenceBlocks, refuse

aten = torch.ops.aten


class SDPA:
    """torch's choice of kernel; on CUDA in the order cuDNN, flash, memory-efficient, math."""

    name = "sdpa"
    blocks: BlockKernel | None = ReferenceBlocks()
    kernels = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]

    def prepare(
        self,
        document_ids: torch.Tensor | None,
        document_starts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Boolean (B, 1, S, S), True where a query may look; None for plain causal attention."""
        if document_ids is None:
            return None
        same = document_ids[:, :, None] == document_ids[:, None, :]
        return same.tril()[:, None]

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(self.kernels, set_priority=True):
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2)


class SDPAMath(SDPA):
    """The reference: softmax(q k^T) v in plain operators, the score matrix in memory."""

    name = "sdpa_math"
    kernels = [SDPBackend.MATH]


class _Unmasked(SDPA):
    """A kernel that takes no mask."""

    def prepare(
        self,
        document_ids: torch.Tensor | None,
        document_starts: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> None:
        """Nothing. ConfigError: there are documents."""
        if document_ids is not None:
            raise ConfigError(f'attention.backend = "{self.name}" knows no document masks, and there are documents.')


class FlashBlocks:
    """FlashAttention-2 as built into torch, by its own operators. bfloat16 on CUDA, D a multiple of 8."""

    masks = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        refuse(mask)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=q.shape[-1] ** -0.5)
        return out.transpose(1, 2), lse

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        refuse(mask)
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
        grads = aten._scaled_dot_product_flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.shape[2],
            max_k=k.shape[2],
            dropout_p=0.0,
            is_causal=causal,
            philox_seed=unused,
            philox_offset=unused,
            scale=q.shape[-1] ** -0.5,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


class CuDNNBlocks:
    """cuDNN's attention by torch's operators. bfloat16 on CUDA, D a multiple of 8 and at most 128."""

    masks = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        refuse(mask)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False, scale=q.shape[-1] ** -0.5
        )
        return out.transpose(1, 2), lse.view(q.shape[:3])  # it keeps a last axis of 1

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        refuse(mask)
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        unused = torch.empty((), dtype=torch.int64, device=q.device)  # the state of dropout
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous().unsqueeze(-1),
            philox_seed=unused,
            philox_offset=unused,
            attn_bias=None,
            cum_seq_q=None,
            cum_seq_k=None,
            max_q=q.shape[2],
            max_k=k.shape[2],
            dropout_p=0.0,
            is_causal=causal,
            scale=q.shape[-1] ** -0.5,
        )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv


class SDPAFlash(_Unmasked):
    """FlashAttention-2 as built into torch, and no other kernel."""

    name = "sdpa_flash"
    blocks: BlockKernel | None = FlashBlocks()
    kernels = [SDPBackend.FLASH_ATTENTION]


class SDPACuDNN(_Unmasked):
    """cuDNN's attention, and no other kernel."""

    name = "sdpa_cudnn"
    blocks: BlockKernel | None = CuDNNBlocks()
    kernels = [SDPBackend.CUDNN_ATTENTION]
