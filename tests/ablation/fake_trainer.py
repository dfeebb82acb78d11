"""Stands in for train.py under the runner: the same arguments and files, a made-up loss, no torch.

FAKE_HANG names an arm that stays in its second step, FAKE_FAIL one that fails; FAKE_JOURNAL gets a line at start and
end.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from config.load import load, to_toml

STEPS = 4


def main() -> int:
    resolved = load()
    directory, arm = Path(resolved.config.job.run_dir), resolved.arm
    text = to_toml(resolved.config)
    if (directory / "DONE").exists():
        print("done already")
        return 0
    files = list(directory.glob("*")) if directory.is_dir() else []
    if files:
        kept = directory / "attempts"
        attempt = kept / str(len(list(kept.glob("*"))) + 1)
        attempt.mkdir(parents=True)
        for file in files:
            if file != kept:
                file.rename(attempt / file.name)
    directory.mkdir(parents=True, exist_ok=True)
    journal(f"start {directory}")
    (directory / "config.toml").write_text(text)
    record = {
        "started": now(),
        "ablation": {"name": Path(resolved.config.job.config_file).stem, "arm": arm},
        "seeds": {"init_seed": resolved.config.debug.seed},
        "tokens_per_step": 1,
        "world_size": 1,
    }
    (directory / "run.json").write_text(json.dumps(record))
    for step in range(1, STEPS + 1):
        if step == 2 and os.environ.get("FAKE_HANG") == arm:
            time.sleep(600)
        loss = int(hashlib.sha256(f"{text}{step}".encode()).hexdigest()[:6], 16) / 2**22
        with (directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "validation_metrics/loss": loss, "throughput(tps)": 1000.0}) + "\n")
    if os.environ.get("FAKE_FAIL") == arm:
        (directory / "FAILED").write_text(json.dumps({"finished": now(), "reason": "loss is NaN at step 4"}))
        print("something went wrong")
        return 1
    (directory / "DONE").write_text(json.dumps({"finished": now(), "steps": STEPS, "reason": "trained"}))
    journal(f"end {directory}")
    return 0


def now() -> str:
    return datetime.now(UTC).isoformat()


def journal(line: str) -> None:
    if path := os.environ.get("FAKE_JOURNAL"):
        with open(path, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
