"""A model cut into pipeline stages, of which a rank holds one or more."""

import copy
import logging

from torch import nn

logger = logging.getLogger(__name__)


class Stages(nn.Module):
    """The stages on this rank, by their place in the pipeline.

    Parameters keep the names they have in the whole model (parallelisms/names.py), so initial weights, weight decay and
    checkpoints do not know of stages.
    """

    def __init__(self, stages: dict[int, nn.Module], *, tied: bool = False):
        super().__init__()
        self.tied = tied
        self.stages = nn.ModuleDict({str(index): stage for index, stage in stages.items()})

    def items(self) -> list[tuple[int, nn.Module]]:
        """(place in the pipeline, stage) in order."""
        return [(int(index), stage) for index, stage in self.stages.items()]

    def copies(self) -> list[nn.Parameter]:
        """Parameters that an earlier stage holds as well: the matrix of a head that is tied to the embedding."""
        return [
            stage.output.weight for index, stage in self.items() if self.tied and index and stage.output is not None
        ]

    def originals(self) -> list[nn.Parameter]:
        """Parameters that a later stage holds a copy of."""
        return [stage.tok_embeddings.weight for index, stage in self.items() if self.tied and index == 0]


def split(model: nn.Module, modules: list[list[str]], mine: list[int]) -> Stages:
    """The stages ``mine`` of ``model``, which is on the meta device, each with its own modules alone.

    Args:
        model: ``tok_embeddings``, ``layers``, ``norm``, ``output``.
        modules: names of each stage's modules.
        mine: stages this rank holds.

    A stage with a head that is tied to the embedding keeps both: they are one matrix.
    """
    tied = model.get_submodule("output").weight is model.get_submodule("tok_embeddings").weight
    kept: dict[int, nn.Module] = {}
    for index in mine:
        stage, names = copy.deepcopy(model), set(modules[index])
        if tied and "output" in names:
            names.add("tok_embeddings")
        for name in ("tok_embeddings", "norm", "output"):
            if name not in names:
                setattr(stage, name, None)
        layers = stage.get_submodule("layers")
        for block in [b for b, _ in layers.named_children() if f"layers.{b}" not in names]:
            delattr(layers, block)
        kept[index] = stage
    logger.info("Split into %d pipeline stages; this rank holds %s", len(modules), _described(modules, mine))
    return Stages(kept, tied=tied)


def _described(modules: list[list[str]], mine: list[int]) -> str:
    parts = [
        f"{i} ({modules[i][0]} to {modules[i][-1]})" if len(modules[i]) > 1 else f"{i} ({modules[i][0]})" for i in mine
    ]
    return ", ".join(parts)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """What techniques apply to: each pipeline stage of this rank, or the model."""
    return [stage for _, stage in model.items()] if isinstance(model, Stages) else [model]
