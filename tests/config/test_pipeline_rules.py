"""Pipelines as arithmetic: stages, their ranks, micro-batches, and what is refused with which numbers."""

import pytest

from config.flavors import resolve_shape
from config.load import load
from config.memory import memory
from config.moe_schema import Moe
from config.pipeline import bubble, layers_by_stage, rank_modules, stage_count, stage_modules, stage_ranks
from config.render import render_dry_run
from config.schema import Parallelism
from config.world import check_world, derived, mesh_degrees
from tests.config.refusal import refusal

EXPERTS = {"model.name": "moe", "model.flavor": "debug_moe"}


def section(degree: int, schedule: str = "1F1B", **changes) -> Parallelism:
    return Parallelism(
        pipeline_parallel_degree=degree,
        pipeline_parallel_schedule=schedule,  # type: ignore[arg-type]
        **{name if name.startswith("module") else f"pipeline_parallel_{name}": v for name, v in changes.items()},
    )


def words(**changes) -> list[str]:
    values = {
        "training.global_batch_size": 16, "training.local_batch_size": 4, "parallelism.pipeline_parallel_degree": 2,
    }  # fmt: skip
    values |= {f"parallelism.pipeline_parallel_{name}": value for name, value in changes.items() if "." not in name}
    values |= {name: value for name, value in changes.items() if "." in name}
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize(
    ("of", "layers", "expected"),
    [
        (section(2), 4, [2, 2]),
        (section(2), 5, [3, 2]),
        (section(4), 32, [8, 9, 8, 7]),  # torchtitan 0.2.2 splits Llama 3 8B so
        (section(4, first_stage_less_layers=0, last_stage_less_layers=0), 32, [8, 8, 8, 8]),
        (section(2, "Interleaved1F1B"), 4, [1, 2, 1, 0]),
        (section(2, "Interleaved1F1B", layers_per_stage=1), 4, [0, 1, 1, 1, 1, 0]),
        (section(2, "DualPipeV"), 6, [1, 2, 2, 1]),
    ],
)
def test_embedding_and_head_stand_for_a_layer(of, layers, expected):
    assert layers_by_stage(of, layers) == expected
    stages = stage_modules(of, layers)
    assert stages[0][0] == "tok_embeddings" and stages[-1][-2:] == ["norm", "output"]
    assert [sum(m.startswith("layers.") for m in stage) for stage in stages] == expected


def test_a_v_comes_back_to_the_first_rank():
    assert stage_ranks(section(3, "ZBVZeroBubble"), 6) == [0, 1, 2, 2, 1, 0]
    assert stage_ranks(section(3, "Interleaved1F1B"), 6) == [0, 1, 2, 0, 1, 2]


def test_explicit_stages_are_taken_as_they_are():
    stages = [["tok_embeddings", "layers.0"], ["norm", "output"]]
    assert stage_modules(section(2, module_fqns_per_model_part=stages), 1) == stages
    assert stage_count(section(2, module_fqns_per_model_part=stages), 1) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"degree": 8},
            "parallelism.pipeline_parallel_degree = 8 (command line) with parallelism.pipeline_parallel_schedule ="
            ' "1F1B" (default) makes 8 stages of 4 layers, 1 less in the first and 1 less in the last: they do not',
        ),
        (
            {"layers_per_stage": 1},
            'parallelism.pipeline_parallel_schedule = "1F1B" (default) needs stages 1 on each rank, and 6 come from 4'
            " layers and parallelism.pipeline_parallel_layers_per_stage = 1 (command line)",
        ),
        (
            {"schedule": "Interleaved1F1B", "layers_per_stage": 3},
            "needs stages 2 or more on each rank, equally many, and 2 come from 4 layers",
        ),
        ({"microbatch_size": 3}, "training.local_batch_size = 4 (command line) is not divisible by"),
        (
            {"parallelism.module_fqns_per_model_part": '[["tok_embeddings", "layers.0", "layers.2"], ["output"]]'},
            'module_fqns_per_model_part: "layers.2" stands where "layers.1" belongs',
        ),
        (
            {"schedule": "ZBVZeroBubble", "activation_checkpoint.mode": "full"},
            'activation_checkpoint.mode = "full" (command line): gradients of inputs and of weights are computed in two'
            " passes",
        ),
        (
            {"schedule": "ZBVZeroBubble", "parallelism.fsdp_reshard_after_forward": "always"},
            'fsdp_reshard_after_forward = "always" (command line)',
        ),
        ({"schedule": "DualPipeV", "compile.enable": "true"}, "a compiled block is one node of it (torchtitan #3584)"),
        (
            EXPERTS | {"moe.z_loss_coeff": 0.001},
            'moe.balance = "aux_loss" (default) and moe.z_loss_coeff = 0.001 (command line) with'
            " parallelism.pipeline_parallel_microbatch_size = 1 (default) and training.local_batch_size = 4 (command"
            " line): it is taken over a whole local batch",
        ),
        (EXPERTS | {"moe.balance": "quantile", "moe.quantile_preset": "megatron"}, "moe.quantile_preset ="),
        (EXPERTS | {"moe.balance": "bias_sign", "moe.extra_sequence_coeff": 0.1}, "moe.extra_sequence_coeff ="),
        (EXPERTS | {"moe.balance": "none", "moe.capacity": "score"}, "moe.capacity ="),
        (EXPERTS | {"moe.balance": "none", "moe.routing": "expert_choice"}, "moe.routing ="),
        (
            EXPERTS | {"moe.balance": "global_aux_loss", "moe.f_source": "exact", "microbatch_size": 4},
            "the load comes from a forward pass of the whole model",
        ),
        ({"parallelism.fsdp_version": 1}, "legacy arm for data parallelism alone"),
    ],
)
def test_what_no_number_of_ranks_can_save_is_refused_when_it_is_read(tmp_path, changes, message):
    assert message in refusal(tmp_path, load, words(**changes))


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        (
            {"training.global_batch_size": 4, "microbatch_size": 4},
            2,
            'parallelism.pipeline_parallel_schedule = "1F1B" needs 2 micro-batches for 2 ranks, and gradient'
            " accumulation(1) x local_batch_size(4) / pipeline_parallel_microbatch_size(4) = 1.",
        ),
        (
            {"training.global_batch_size": 4, "schedule": "ZBVZeroBubble", "microbatch_size": 2},
            2,
            "needs 4 micro-batch",
        ),
        (
            {"training.global_batch_size": 5, "training.local_batch_size": 5, "schedule": "InterleavedZeroBubble"},
            2,
            "runs 2 equal rounds of micro-batches, and gradient accumulation(1) x local_batch_size(5)",
        ),
    ],
)
def test_too_few_micro_batches_are_refused_once_the_ranks_are_known(tmp_path, changes, world_size, message):
    assert message in refusal(tmp_path, check_world, load(words(**changes)).config, world_size)


def test_a_pipeline_reads_the_same_data_on_each_of_its_ranks():
    config = load(words()).config
    assert mesh_degrees(config, 4).items() >= {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 1}.items()
    numbers = derived(config, 4)
    assert numbers["data_parallel_degree"].value == 2
    assert numbers["pipeline_micro_batches"].value == 8
    assert derived(load(words(schedule="naive")).config, 4)["pipeline_micro_batches"].value == 2


def test_predicted_bubbles():
    assert bubble(section(4, "naive"), 8, 16) == pytest.approx(3 / 4)
    assert bubble(section(4, "GPipe"), 8, 16) == bubble(section(4), 8, 16) == pytest.approx(3 / 19)
    assert bubble(section(4, "Interleaved1F1B"), 8, 16) == pytest.approx(3 / 35)
    assert bubble(section(4, "ZBVZeroBubble"), 8, 16) == pytest.approx(1.5 / 49.5)


def test_the_dry_run_says_where_layers_are_and_how_long_ranks_wait():
    text = render_dry_run(load(words(schedule="ZBVZeroBubble")), 2)
    assert "layers 1 2 1 0, on ranks 0 1 1 0" in text
    assert "waiting, predicted" in text and "1.0 %" in text


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_the_memory_of_ranks_adds_up_to_the_models(schedule, tied):
    """But for the matrix of a tied head, which the last stage holds as the first does."""
    shape = resolve_shape(load(["--model.enable_weight_tying", str(tied).lower()]).config.model, Moe())
    whole = memory(shape, "AdamW").parameters
    parts = [memory(shape, "AdamW", modules=m).parameters for m in rank_modules(section(2, schedule), shape.n_layers)]
    twice = 4 * shape.vocab_size * shape.dim * tied
    assert sum(parts) == whole + twice
    assert max(parts) < whole


def test_a_rank_of_a_pipeline_holds_the_experts_of_its_own_layers():
    """The first layers are dense: experts are counted where they are, not as many layers from the bottom."""
    config = load([*words(**EXPERTS, **{"moe.first_dense_layers": 2, "microbatch_size": 4})]).config
    shape = resolve_shape(config.model, config.moe)
    assert shape.moe is not None and shape.n_layers == 4
    first, second = (memory(shape, "SGD", modules=m).parameters for m in rank_modules(section(2), 4))
    assert first + second == memory(shape, "SGD").parameters
    an_expert = 4 * 3 * shape.dim * shape.moe.hidden_dim
    assert second > 2 * shape.moe.num_experts * an_expert > first
