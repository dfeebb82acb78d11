import pytest

from config.errors import ConfigError
from config.load import load

MOE = ["--model.name", "moe", "--model.flavor", "debug_moe"]
EXACT = ["--moe.balance", "global_aux_loss", "--moe.f_source", "exact"]


def refused(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        load([*MOE, *arguments])
    return str(error.value)


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["--moe.top_k", "8"], ["moe.top_k = 8", "moe.num_experts = 8 (flavor debug_moe)"]),
        (["--moe.num_groups", "3"], ["moe.num_experts = 8", "moe.num_groups = 3"]),
        (["--moe.top_groups", "2"], ["moe.top_groups = 2", "moe.num_groups = 1"]),
        (["--moe.num_groups", "8", "--moe.top_groups", "1"], ["moe.top_groups = 1", "groups of 1 experts"]),
        (["--moe.first_dense_layers", "4"], ["leave no layer with experts", "model.n_layers = 4"]),
        (["--moe.balance", "quantile", "--moe.num_groups", "2", "--moe.top_groups", "2"], ["does not know groups"]),
        (["--moe.balance", "quantile", "--moe.gumbel_tau", "1.0"], ["gumbel_tau = 0"]),
        (["--moe.balance", "bias_sign", "--moe.routing", "expert_choice"], ["balanced by construction"]),
        (["--moe.balance", "none", "--moe.capacity", "score", "--moe.routing", "expert_choice"], ["as it holds"]),
        (["--moe.capacity", "score", "--moe.capacity_factor", "0.0"], ["drops every token"]),
        (["--moe.experts", "loop", "--compile.enable"], ["cannot be compiled", "grouped_mm"]),
        (
            [*EXACT, "--parallelism.pipeline_parallel_degree", "2"],
            ["parallelism.pipeline_parallel_degree = 2", 'moe.f_source = "exact"', "no schedule has one"],
        ),
        (["--moe.experts", "quack", "--training.mixed_precision_param", "float32"], ["bfloat16"]),
        (["--moe.hidden_dim", "100"], ["moe.hidden_dim = 100", "multiples of 8"]),
        (
            ["--moe.hidden_dim", "72", "--parallelism.tensor_parallel_degree", "2"],
            ["moe.hidden_dim = 72", "over parallelism.tensor_parallel_degree = 2"],
        ),
    ],
)
def test_refused_with_numbers_and_a_way_out(arguments, parts):
    message = refused(*arguments)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--moe.experts", "loop"],
        ["--training.mixed_precision_param", "float32"],
    ],
)
def test_sizes_matter_to_kernels_in_bfloat16_alone(arguments):
    load([*MOE, "--moe.hidden_dim", "100", *arguments])


def test_experts_that_stay_whole_are_not_cut():
    whole = ["--parallelism.tensor_parallel_degree", "2", "--parallelism.expert_parallel_degree", "2"]
    load([*MOE, "--moe.hidden_dim", "72", *whole])


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--moe.top_k", "1", "--moe.route_norm"], "the router gets no gradient"),
        (["--moe.balance", "none", "--moe.routing", "expert_choice"], "later tokens decide"),
        (["--moe.balance", "forced_uniform"], "overrules the router"),
        (["--moe.count_dtype", "bfloat16"], "stick at 256"),
        (["--moe.aux_loss_coeff", "0.1"], "usual values"),
    ],
)
def test_warned_about(arguments, part):
    notes = load([*MOE, *arguments]).notes
    assert any(part in note for note in notes), notes
    assert not any(part in note for note in load(MOE).notes)


def test_a_dense_twin_reads_nothing_of_moe():
    load(["--model.name", "moe", "--model.flavor", "debug_moe_dense", "--moe.top_k", "8"])
