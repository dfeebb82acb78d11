"""Everything taken from torchtitan, and the only file that imports it.

torchtitan moved 68 % of its public symbols between 0.2.2 and 0.3.0, so what the trainer takes is named here once, for
one release, and tests/test_titan.py holds the signatures. Each name is imported when it is first used: the leaves
differ in what they pull in (TensorBoard, tokenizers, tyro, functorch), and a user of one need not have or pay for the
others.

    from titan import clip_grad_norm_, dist_sum
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from typing import TYPE_CHECKING, Any

from config.errors import ConfigError

if TYPE_CHECKING:
    from torchtitan.components.metrics import TensorBoardLogger as TensorBoardLogger
    from torchtitan.components.tokenizer import HuggingFaceTokenizer as HuggingFaceTokenizer
    from torchtitan.distributed.activation_checkpoint import FullAC as FullAC
    from torchtitan.distributed.activation_checkpoint import SelectiveAC as SelectiveAC
    from torchtitan.distributed.utils import clip_grad_norm_ as clip_grad_norm_
    from torchtitan.distributed.utils import dist_max as dist_max
    from torchtitan.distributed.utils import dist_mean as dist_mean
    from torchtitan.distributed.utils import dist_sum as dist_sum
    from torchtitan.tools.utils import GarbageCollection as GarbageCollection

VERSION = "0.3.0"

# What is taken, and where it lives in that release.
TAKEN = {
    "clip_grad_norm_": "torchtitan.distributed.utils",  # one norm over dense, expert and pipeline meshes
    "dist_sum": "torchtitan.distributed.utils",
    "dist_max": "torchtitan.distributed.utils",
    "dist_mean": "torchtitan.distributed.utils",
    "GarbageCollection": "torchtitan.tools.utils",
    "TensorBoardLogger": "torchtitan.components.metrics",  # not MetricsProcessor: it wants CUDA
    "HuggingFaceTokenizer": "torchtitan.components.tokenizer",
    "SelectiveAC": "torchtitan.distributed.activation_checkpoint",
    "FullAC": "torchtitan.distributed.activation_checkpoint",
}


def __getattr__(name: str) -> Any:
    """A name of TAKEN, imported on first use. ConfigError if torchtitan is missing or of another version."""
    if name not in TAKEN:
        raise AttributeError(f"titan takes nothing called {name!r} from torchtitan")
    value = getattr(_leaf(TAKEN[name]), name)
    globals()[name] = value
    return value


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of a device in FLOP/s by torchtitan's table, or None for a device it does not know.

    torchtitan answers an unknown device with an A100's peak and a warning. No MFU is better than one of the wrong card.
    """
    get_peak_flops = _leaf("torchtitan.tools.utils").get_peak_flops
    unknown: list[str] = []

    def listen(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "fallback to A100" in message:
            unknown.append(message)
        # The other warning says that lspci is missing; the name given is then used, which is what was asked for.
        return not any(part in message for part in ("fallback to A100", "lspci"))

    root = logging.getLogger()
    root.addFilter(listen)
    try:
        peak = get_peak_flops(device_name)
    finally:
        root.removeFilter(listen)
    return None if unknown else float(peak)


def _leaf(module: str) -> Any:
    """Import a torchtitan module after checking the installed version, its information lines silenced."""
    try:
        found = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    if found != VERSION:
        raise ConfigError(
            f"torchtitan {VERSION} is needed, found: {found}. Its names move between releases, so no other version "
            f'works. Install it with: pip install "torchtitan=={VERSION}"'
        )
    root = logging.getLogger()
    if _no_torchtitan_chatter not in root.filters:
        root.addFilter(_no_torchtitan_chatter)
    return importlib.import_module(module)


def _no_torchtitan_chatter(record: logging.LogRecord) -> bool:
    """Drop torchtitan's lines below a warning: it logs to the root logger, and the trainer says the same itself."""
    return record.levelno >= logging.WARNING or "/torchtitan/" not in record.pathname.replace("\\", "/")
