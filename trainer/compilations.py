"""What torch.compile compiles while a run goes on, and why it compiles something again.

A graph holds for the sizes, flags and objects it was traced with; where one of them changes, the code is traced again,
silently. Past torch's limit it is not compiled any more. Both show as a run that is slower than it should be.
"""

import logging
from pathlib import Path

import torch._dynamo.utils as dynamo

logger = logging.getLogger(__name__)

RECOMPILATIONS = "compile/recompilations"
_KEPT = 4096  # torch keeps 64 records unless it is told otherwise
_WITH_AND_WITHOUT_GRADIENTS = "grad_mode"


class Compilations:
    """Watches this process. Training and validation need a graph each, with and without gradients: that counts as none.

    Args:
        speaks: warn of each recompilation, with the reason torch gives.
    """

    def __init__(self, *, speaks: bool = True):
        dynamo.set_compilation_metrics_limit(_KEPT)
        self._seen = len(dynamo.get_compilation_metrics())
        self._speaks = speaks
        self.recompilations = 0
        """So far."""

    def happened(self) -> bool:
        """Whether anything was compiled since the last call; counts and tells what was compiled again."""
        records = dynamo.get_compilation_metrics()
        new, self._seen = records[self._seen :], len(records)
        for record in new:
            reason = record.recompile_reason
            if reason is None or _WITH_AND_WITHOUT_GRADIENTS in reason:
                continue
            self.recompilations += 1
            if self._speaks:
                where = f"{Path(record.co_filename or '').name}:{record.co_firstlineno}"
                why = " ".join(reason.splitlines()[0].split())
                logger.warning("Recompiled %s (%s), as a guard failed: %s", record.co_name, where, why)
        return bool(new)

    def tags(self) -> dict[str, float]:
        """Tag -> value for the log, once anything was compiled."""
        return {RECOMPILATIONS: float(self.recompilations)} if self._seen else {}
