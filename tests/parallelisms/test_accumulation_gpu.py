"""Micro-batches and direct collectives over NCCL: streams, groups of messages, the kernel that sums."""

import os

import pytest

from tests.test_train import launch, losses

pytestmark = pytest.mark.multi_gpu
STEPS = ["--training.steps", "20", "--metrics.log_freq", "1", "--validation.enable", "false"]
STEPS += ["--training.local_batch_size", "2", "--training.global_batch_size", "12"]  # three micro-batches
STEPS += ["--training.mixed_precision_param", "bfloat16", "--debug.deterministic", "--debug.deterministic_warn_only"]
DIRECT = ["--parallelism.fsdp_collectives", "direct"]
WAYS = {
    "direct": DIRECT,
    "direct, two ahead": [*DIRECT, "--parallelism.fsdp_prefetch_blocks", "2"],
    "freed": ["--parallelism.fsdp_reshard_after_backward", "always"],
    "kept": ["--parallelism.fsdp_reshard_after_backward", "never"],
    "direct, gathered once": [
        *DIRECT,
        "--parallelism.fsdp_reshard_after_backward",
        "never",
        "--parallelism.fsdp_reshard_after_forward",
        "never",
    ],
    "direct, recomputed": [*DIRECT, "--activation_checkpoint.mode", "full"],
}


@pytest.mark.parametrize("model", ["llama_debug", "debug_moe"])
def test_on_two_gpus_none_of_it_changes_a_bit(tmp_path, model):
    """Losses of twenty steps; a message that comes late or memory that is reused early shows in the next."""

    def trained(name: str, *options: str) -> dict[int, float]:
        words = ["--job.config_file", f"train_configs/{model}.toml", *STEPS, *options]
        done = launch(tmp_path / name, *words, ranks=2, environment=dict(os.environ))
        assert done.returncode == 0, done.stdout + done.stderr
        return losses(tmp_path / name)

    packed = trained("packed")
    assert packed == trained("again"), "this model is not deterministic here: nothing to compare"
    assert packed[20] < packed[1]
    for name, options in WAYS.items():
        assert packed == trained(name.replace(", ", "-").replace(" ", "-"), *options), name
