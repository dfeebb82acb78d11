"""Train as train.py does, and print the seconds of each phase up to the end of the first step.

    python -m benchmarks.start_phases BEGUN --job.config_file ...

BEGUN is the time (s since 1970) at which the process was started. The last line of output is a JSON object, phase ->
seconds, in order; what lies between two phases belongs to the later one.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


class Phases:
    """Seconds since the last mark, under the name of what has just ended."""

    def __init__(self, begun: float):
        self.last, self.seconds = begun, {}  # type: float, dict[str, float]

    def mark(self, name: str) -> None:
        """``name`` ends now; again only with the first."""
        if name not in self.seconds:
            now = time.time()
            self.seconds[name], self.last = now - self.last, now

    def after(self, owner: Any, function: str, name: str) -> None:
        """Let ``name`` end whenever ``owner.function`` has returned."""
        inner = getattr(owner, function)

        def call(*arguments: Any, **options: Any) -> Any:
            result = inner(*arguments, **options)
            self.mark(name)
            return result

        setattr(owner, function, call)


def main() -> int:
    """Returns train.py's exit code."""
    phases = Phases(float(sys.argv[1]))
    import torch

    phases.mark("interpreter and torch")
    import train
    from trainer.train_step import TrainStep

    phases.mark("other imports")
    phases.after(train, "load", "configuration")
    phases.after(train, "build_data", "data")
    phases.after(train, "open_run_directory", "run directory")
    phases.after(train, "build_model", "model")
    phases.after(train, "build_step", "optimizer")
    phases.after(TrainStep, "__call__", "first step")
    sys.argv = ["train.py", *sys.argv[2:]]
    code = train.main()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(json.dumps(phases.seconds))
    return code


if __name__ == "__main__":
    sys.exit(main())
