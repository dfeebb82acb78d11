"""The dtype of compute where autocast gives it, and not FSDP2.

FSDP2 hands every module its weights in the dtype of compute, so that all activations have it. Autocast casts what
matrix products read and leaves embedding, norms and the sums between blocks float32: twice the bytes, and another
rounding than the same model's on another mesh. Here those are in the dtype of compute as well; a comparison of DDP
with FSDP2 then compares their communication.
"""

import torch
from torch import nn
from torch.nn import functional as F


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that a linear layer would compute in here, ``x``'s own without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm in the dtype of its input: computed in float32, rounded once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        with torch.autocast(x.device.type, enabled=False):  # under it the result is float32
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
