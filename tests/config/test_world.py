"""Degrees of parallelism, batch sizes and derived numbers against the number of ranks."""

import pytest

from config.load import load
from config.world import check_devices, check_world, derived, mesh_degrees, smallest_world, world_size_from
from tests.config.refusal import refusal

REPLICATE, SHARD = "--parallelism.data_parallel_replicate_degree", "--parallelism.data_parallel_shard_degree"


@pytest.mark.parametrize(
    ("words", "world_size", "degrees"),
    [
        ([], 1, {"dp_replicate": 1, "dp_shard": 1}),
        ([], 8, {"dp_replicate": 1, "dp_shard": 8}),
        ([REPLICATE, "2"], 8, {"dp_replicate": 2, "dp_shard": 4}),
        ([REPLICATE, "8", SHARD, "1"], 8, {"dp_replicate": 8, "dp_shard": 1}),
    ],
)
def test_shard_degree_is_what_is_left_over(words, world_size, degrees):
    assert mesh_degrees(load(words).config, world_size).items() >= degrees.items()


def test_degrees_that_do_not_multiply_to_the_world_size(tmp_path):
    message = refusal(tmp_path, check_world, load([REPLICATE, "2", SHARD, "3"]).config, 8)
    assert message == (
        "parallelism: dp_replicate(2) x dp_shard(3) = 6 but WORLD_SIZE is 8."
        " Set data_parallel_shard_degree = -1 to derive it (4)."
    )
    message = refusal(tmp_path, check_world, load([REPLICATE, "3"]).config, 8)
    assert message.startswith("parallelism: dp_replicate(3) does not divide WORLD_SIZE 8. Choose degrees that divide 8")
    assert smallest_world(load([REPLICATE, "3"]).config) == 3


def test_global_batch_that_does_not_divide(tmp_path):
    config = load(["--training.global_batch_size", "24", "--training.local_batch_size", "4"]).config
    message = refusal(tmp_path, check_world, config, 4)
    assert message == (
        "training.global_batch_size = 24 is not divisible by local_batch_size(4) x data-parallel degree(4) = 16."
        " Set training.global_batch_size = 16 or 32, or training.local_batch_size = 3."
    )
    assert check_world(config, 2)["dp_shard"] == 2


def test_derived_numbers_and_their_rules():
    words = ["--training.global_batch_size", "32", "--training.local_batch_size", "4", "--training.seq_len", "128"]
    numbers = derived(load([*words, "--training.steps", "10"]).config, 2)
    assert {name: item.value for name, item in numbers.items()} == {
        "data_parallel_degree": 2,
        "global_batch_size": 32,
        "gradient_accumulation_steps": 4,
        "tokens_per_step": 4096,
        "tokens": 40_960,
    }
    assert numbers["global_batch_size"].rule == "training.global_batch_size"
    local = derived(load(["--training.local_batch_size", "4"]).config, 2)
    assert (local["global_batch_size"].value, local["gradient_accumulation_steps"].value) == (8, 1)
    assert local["global_batch_size"].rule == "local_batch_size x data_parallel_degree"


def test_ranks_that_share_a_sequence_do_not_multiply_tokens():
    words = ["--training.global_batch_size", "8", "--training.local_batch_size", "2", "--training.seq_len", "128"]
    one = derived(load(words).config, 1)
    for degree in ("tensor_parallel_degree", "context_parallel_degree"):
        numbers = derived(load([*words, f"--parallelism.{degree}", "2"]).config, 4)
        assert numbers["data_parallel_degree"].value == 2
        assert numbers["tokens_per_step"].value == one["tokens_per_step"].value == 1024


def test_world_size_comes_from_torchrun_else_from_the_launcher(tmp_path):
    assert world_size_from({}) is None
    assert world_size_from({"NGPU": "4", "NNODES": "2"}) == 8
    assert world_size_from({"NGPU": "4", "WORLD_SIZE": "2"}) == 2
    assert 'NGPU = "two" (environment)' in refusal(tmp_path, world_size_from, {"NGPU": "two"})
    assert "at least 1" in refusal(tmp_path, world_size_from, {"WORLD_SIZE": "0"})


def test_more_ranks_than_gpus(tmp_path):
    message = refusal(tmp_path, check_devices, 4, 2, "cuda")
    assert message.startswith("NGPU = 4 but this machine has 2 GPUs. Set NGPU=2")
    check_devices(2, 2, "cuda")
    check_devices(64, 0, "cpu")
