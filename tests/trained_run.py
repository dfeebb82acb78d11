"""Short runs with checkpoints, trained as a user trains them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.data.generated import generated_texts, write_jsonl

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "--data.corpus", "text", "--data.tokenizer", "bytes", "--model.vocab_size", "257", "--model.max_seq_len", "128",
    "--training.seq_len", "64", "--training.local_batch_size", "8", "--training.global_batch_size", "8",
    "--training.steps", "40", "--training.mixed_precision_param", "float32", "--validation.enable", "false",
    "--checkpoint.enable", "--checkpoint.interval", "20",
]  # fmt: skip


def train_run(folder: Path, config_file: str, *options: str) -> Path:
    """40 steps on generated sentences, saved at 20 and 40; the run directory."""
    corpus = write_jsonl(folder / "corpus" / "rows.jsonl", generated_texts(2000)).parent
    command = [sys.executable, str(ROOT / "train.py"), "--job.config_file", str(ROOT / "train_configs" / config_file)]
    command += ["--job.run_dir", str(folder / "run"), "--data.path", str(corpus), *TINY, *options]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"
