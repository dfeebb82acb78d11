"""Same run twice, same bits: on one machine, one mesh and one set of versions."""

import os

import torch


def set_determinism(*, enabled: bool, warn_only: bool) -> None:
    """Ask PyTorch for deterministic algorithms. Weights, data and noise have generators of their own; none is global.

    Args:
        warn_only: warn about an operator that has no deterministic form instead of failing.
    """
    if not enabled:
        return
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
