"""What expert parallelism decides before a start: degrees, derived numbers, memory, notes, torchtitan's keys."""

import pytest

from config.flavors import FLAVORS
from config.load import load
from config.memory import FLOAT32_BYTES, ExpertDegrees, memory
from config.render import render_dry_run
from config.world import derived, mesh_degrees, smallest_world
from tests.config.refusal import refusal

MOE = ["--model.name", "moe", "--model.flavor", "debug_moe"]
EP, TP = "--parallelism.expert_parallel_degree", "--parallelism.tensor_parallel_degree"


def test_experts_share_out_the_ranks_that_shard_or_cut_the_rest():
    config = load([*MOE, EP, "4", TP, "2"]).config
    assert mesh_degrees(config, 8).items() >= {"dp_shard": 4, "tp": 2, "ep": 4, "etp": 1}.items()
    assert derived(config, 8)["local_experts"].value == 2
    assert derived(config, 8)["data_parallel_degree"].value == 4, "every data rank reads other sequences, as without"
    assert smallest_world(config) == 4
    both = load([*MOE, EP, "2", TP, "2", "--parallelism.expert_tensor_parallel_degree", "2"]).config
    assert smallest_world(both) == 4
    assert "local_experts" not in derived(load(MOE).config, 8)


@pytest.mark.parametrize(
    ("words", "world_size", "message"),
    [
        ([EP, "4"], 2, "dp_shard(2) x cp(1) x tp(1) = 2 ranks. Choose a degree that divides them: 1, 2."),
        ([EP, "2", "--parallelism.data_parallel_replicate_degree", "4"], 4, "= 1 ranks"),
        ([EP, "4", TP, "2", "--parallelism.expert_tensor_parallel_degree", "2"], 4, "and 2 share each expert"),
        (
            [EP, "2", "--moe.num_experts", "6", "--model.dim", "8", "--model.n_heads", "2"],
            10,
            "3 experts of each share",
        ),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_numbers(tmp_path, words, world_size, message):
    config = load([*MOE, *words]).config
    said = refusal(tmp_path, mesh_degrees, config, world_size)
    assert said.startswith("parallelism.expert_parallel_degree = ") and message in said


def test_a_dense_model_has_no_experts_to_spread():
    resolved = load([EP, "4"])
    assert any("expert_parallel_degree = 4 has no effect" in note for note in resolved.notes)
    assert mesh_degrees(resolved.config, 2)["ep"] == 1 and smallest_world(resolved.config) == 1


def test_keys_of_expert_parallelism_without_it_are_noted():
    notes = load([*MOE, "--moe.dispatcher", "all_to_all_dedup"]).notes
    assert any('moe.dispatcher = "all_to_all_dedup" has no effect' in note for note in notes)


def test_memory_spreads_experts_over_ep_and_efsdp_and_the_rest_over_all():
    shape = FLAVORS["moe"]["moe_7b_a1b"]
    experts = 16 * 64 * 3 * 2048 * 1024
    rest = memory(shape, "AdamW").parameters - FLOAT32_BYTES * experts
    for spread in (ExpertDegrees(8, 1, 1), ExpertDegrees(2, 1, 4), ExpertDegrees(4, 2, 1)):
        held = memory(shape, "AdamW", 8, expert_degrees=spread)
        assert held.parameters == pytest.approx(rest / 8 + FLOAT32_BYTES * experts / 8, rel=1e-4)
    # Two groups of TP 4 with whole experts: FSDP 2 for the rest, every expert on one of 8 ranks.
    narrow = memory(shape, "AdamW", 2, tensor_degree=4, expert_degrees=ExpertDegrees(8, 1, 1))
    assert narrow.parameters == pytest.approx(memory(shape, "AdamW", 2, tensor_degree=4).parameters, rel=1e-2)


def test_the_dry_run_shows_both_views_of_the_ranks():
    text = render_dry_run(load([*MOE, EP, "2", TP, "2"]), 8)
    assert "dp_shard(4) x tp(2); experts: efsdp(4) x ep(2) x etp(1)" in text
    assert "num_experts / expert_parallel_degree" in text


def test_deepep_is_refused_with_the_reason_and_standard_is_read(tmp_path):
    backend = "--parallelism.expert_parallel_comm_backend"
    assert "all_to_all_dedup" in refusal(tmp_path, load, [*MOE, EP, "2", backend, "deepep"])
    assert load([*MOE, EP, "2", backend, "standard"]).config.parallelism.expert_parallel_degree == 2
