"""Expert load as pictures: layers x experts now, and how it drifts over time."""

import json
from typing import Any

import torch

from trainer.run_directory import RunDirectory

_PIXELS = 8
_HISTORY = 200


def heat(ratio: torch.Tensor) -> torch.Tensor:
    """uint8 (rows, columns, 3): white at the mean load, red at 4 times it and above, blue at a quarter, black at
    nothing.
    """
    level = torch.log2(ratio.double().clamp(min=1e-9)).clamp(-2, 2) / 2
    red = torch.where(level < 0, 1 + level, 1.0)
    blue = torch.where(level > 0, 1 - level, 1.0)
    colours = torch.stack([red, 1 - level.abs(), blue], dim=-1) * (ratio > 0)[..., None]
    return (255 * colours).round().to(torch.uint8)


class LoadMap:
    """Writes ``moe_loads.jsonl``, {"step", "counts": layers x experts} and what else it is given, and, with
    TensorBoard, the images moe/load and moe/drift.

    moe/load has a row a layer and a column an expert. moe/drift has a row a log step, the newest last, and the experts
    of all layers side by side.

    Args:
        run: the open run directory.
        writer: TensorBoard's, or None.
    """

    def __init__(self, run: RunDirectory, writer: Any | None):
        self._file = open(run.path / "moe_loads.jsonl", "a", buffering=1, encoding="utf-8")
        self._writer = writer
        self._history: list[torch.Tensor] = []

    def log(self, step: int, counts: torch.Tensor, **others: list[list[int | None]]) -> None:
        """Write one step's counts, int64 (layers, E), and ``others``, layers x ranks."""
        counts = counts.cpu()
        self._file.write(json.dumps({"step": step, "counts": counts.tolist(), **others}) + "\n")
        if self._writer is None:
            return
        ratio = counts / counts.double().mean(-1, keepdim=True).clamp(min=1e-9)
        self._history = [*self._history, ratio.flatten()][-_HISTORY:]
        for tag, picture in (("moe/load", heat(ratio)), ("moe/drift", heat(torch.stack(self._history)))):
            large = picture.repeat_interleave(_PIXELS, 0).repeat_interleave(_PIXELS, 1)
            self._writer.add_image(tag, large.numpy(), step, dataformats="HWC")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
