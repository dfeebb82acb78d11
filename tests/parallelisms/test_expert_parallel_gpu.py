"""Expert parallelism on GPUs: NCCL, bfloat16 kernels, ranks without tokens."""

import json
import os

import pytest

from tests.test_train import launch, losses

pytestmark = pytest.mark.multi_gpu
BASE = ["--job.config_file", "train_configs/debug_moe.toml", "--training.steps", "20", "--metrics.log_freq", "1"]
BASE += ["--training.local_batch_size", "4", "--validation.enable", "false"]
EP = ["--parallelism.expert_parallel_degree", "2"]


def trained(folder, *options: str, ranks: int = 2) -> dict[int, float]:
    done = launch(folder, *BASE, *options, ranks=ranks, environment=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(folder)


def test_two_gpus_with_different_experts_follow_one(tmp_path):
    one = trained(tmp_path / "one", ranks=1)
    for dispatcher in ("all_to_all", "all_to_all_dedup"):
        two = trained(tmp_path / dispatcher, *EP, "--moe.dispatcher", dispatcher)
        assert max(abs(one[step] - two[step]) for step in one) < 2e-3, dispatcher


def test_bfloat16_compiled_and_recomputed_follow_fsdp(tmp_path):
    narrow = ["--training.mixed_precision_param", "bfloat16"]
    fsdp = trained(tmp_path / "fsdp", *narrow)
    for name, options in {
        "compiled": ["--compile.enable"],
        "recomputed": ["--activation_checkpoint.mode", "full"],
        "by operator": [
            "--activation_checkpoint.mode",
            "selective",
            "--activation_checkpoint.selective_ac_option",
            "op",
        ],
    }.items():
        found = trained(tmp_path / name, *narrow, *EP, *options, "--moe.dispatcher", "all_to_all_dedup")
        assert max(abs(fsdp[step] - found[step]) for step in fsdp) < 0.05, name


def test_a_gpu_without_tokens_neither_hangs_nor_fails(tmp_path):
    skewed = ["--moe.balance", "forced_skew", "--moe.skew_strength", "10000", "--moe.top_k", "1"]
    skewed += ["--training.mixed_precision_param", "bfloat16", "--comm.train_timeout_seconds", "60"]
    found = trained(tmp_path / "run", *EP, *skewed)
    assert found[20] < found[1]
    line = json.loads((tmp_path / "run" / "moe_loads.jsonl").read_text().splitlines()[-1])
    for layer in range(4):
        assert sorted(line["received"][layer])[0] == 0 and max(line["received"][layer]) > 0


@pytest.mark.parametrize(
    "options",
    [[], ["--training.mixed_precision_param", "bfloat16", "--moe.balance", "forced_uniform"]],
    ids=["float32", "bfloat16"],  # there a grouped product of few rows takes other tiles, and forced loads are even
)
def test_overlap_is_bit_equal(tmp_path, options):
    shared = [*options, *EP, "--moe.num_shared_experts", "1"]
    shared += ["--debug.deterministic", "--debug.deterministic_warn_only"]
    plain = trained(tmp_path / "plain", *shared)
    for overlap in ("shared_expert", "experts"):
        assert trained(tmp_path / overlap, *shared, "--moe.comm_overlap", overlap) == plain, overlap
