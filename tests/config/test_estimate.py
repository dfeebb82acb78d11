"""The estimate of peak memory: against counts by hand, and the direction in which each switch moves it."""

import pytest

from config.estimate import NAMES, coefficient_table, estimate, provenance
from config.flavors import resolve_shape
from config.load import load
from config.memory import memory, state_pieces
from config.memory_advice import advice, advice_sentence
from config.saved_tensors import Kernels, Numbers, block
from config.shapes import ModelShape
from config.step_memory import held_by
from config.world import mesh_degrees

COUNTED = dict.fromkeys(NAMES, 1.0)
SHAPE = ModelShape(vocab_size=1000, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=160, max_seq_len=512)


def config_of(*words, file="benchmarks/configs/dense_1b.toml"):
    return load(["--job.config_file", file, "--training.global_batch_size", "4", *words]).config


def peak(*words, world=1, **more):
    return estimate(config_of(*words, **more), world, COUNTED).peak


def test_a_dense_block_in_bfloat16_by_hand():
    found = block(SHAPE, Numbers(2), Kernels(), with_experts=False)
    attention = 2 * (64 + 2 * 32 + 64) + 4 * 4  # queries, keys and values, output; one float32 a head
    assert found.eager == 2 * 64 + 2 * 64 + attention + 2 * 64 + 2 * 64 + 4 * 2 * 160 + 8
    assert found.compiled == 2 * 64 + 2 * 2 * 64 + attention + 2 * 64 + 3 * 2 * 160 + 8
    assert found.operators - found.unread == 2 * 64 + 2 * (64 + 32 + 64) + 4 * 4 + 2 * 160  # wq, wv, attention, w1


def test_liger_s_swiglu_keeps_one_less_eager_and_as_much_compiled():
    plain, fused = (block(SHAPE, Numbers(2), k, with_experts=False) for k in (Kernels(), Kernels(opaque_swiglu=True)))
    assert plain.eager - fused.eager == 2 * 160 and fused.compiled == plain.compiled


def test_tensor_parallelism_divides_what_is_between_matrices():
    whole, half = (block(SHAPE, Numbers(2, t), Kernels(), with_experts=False) for t in (1, 2))
    assert half.boundary == whole.boundary / 2
    assert whole.compiled / 2 <= half.compiled < whole.compiled


@pytest.mark.parametrize("words", [
    ("--activation_checkpoint.mode", "full"),
    ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "2"),
    ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op"),
    ("--activation_checkpoint.mode", "memory_budget", "--activation_checkpoint.memory_budget", "0.3"),
    ("--activation_checkpoint.offload", "true"),
    ("--loss.implementation", "row_chunked"),
    ("--loss.implementation", "vocab_chunked"),
    ("--optimizer.state_dtype", "bfloat16"),
    ("--optimizer.state_offload", "true"),
    ("--training.local_batch_size", "2"),
    ("--model.n_layers", "8"),
], ids=lambda words: words[-1])  # fmt: skip
def test_each_of_these_lowers_the_peak(words):
    assert peak(*words) < peak()


def at_the_loss(name, *words):
    """Bytes of the parts of this name, when all forward passes are done."""
    found = estimate(config_of(*words), 1, COUNTED)
    (moment,) = [moment for moment in found.moments if moment.name == "at the loss"]
    return sum(part.size for part in moment.parts if part.name == name)


def test_offload_leaves_what_two_blocks_save():
    offload = ("--activation_checkpoint.offload", "true")
    two, three, eight = (("--model.n_layers", n) for n in ("2", "3", "8"))
    assert at_the_loss("activations", *offload, *eight) == at_the_loss("activations", *two)
    assert at_the_loss("activations", *two) < at_the_loss("activations", *three)


def test_micro_batches_under_way_are_those_of_the_schedule():
    words = (
        "--training.global_batch_size", "32", "--parallelism.pipeline_parallel_degree", "2",
        "--parallelism.pipeline_parallel_microbatch_size", "1", "--parallelism.pipeline_parallel_schedule",
    )  # fmt: skip
    all_at_once, in_turn, eight = (
        peak(*words, *schedule, world=2)
        for schedule in (("GPipe",), ("1F1B",), ("GPipe", "--training.global_batch_size", "8"))
    )
    assert in_turn < eight < all_at_once


def test_each_chunked_loss_follows_its_own_chunk():
    def loss(name, *words):
        return at_the_loss("loss", "--loss.implementation", name, *words)

    rows, columns = ("--loss.rows_per_chunk", "2048"), ("--loss.columns_per_chunk", "16384")
    assert loss("row_chunked") == loss("row_chunked", *columns) < loss("row_chunked", *rows)
    assert loss("vocab_chunked") == loss("vocab_chunked", *rows) < loss("vocab_chunked", *columns)


def test_more_recomputation_never_takes_more():
    option = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option")
    peaks = [peak("--activation_checkpoint.mode", "full"), *(peak(*option, str(n)) for n in (1, 2, 4)), peak()]
    assert peaks[0] == peaks[1] and peaks == sorted(peaks)


def test_a_memory_budget_of_1_changes_nothing_and_one_of_0_is_full_checkpointing():
    budget = ("--activation_checkpoint.mode", "memory_budget", "--activation_checkpoint.memory_budget")
    peaks = [peak(*budget, str(n)) for n in (0, 0.2, 0.5, 0.8, 1)]
    assert peaks[0] == peak("--activation_checkpoint.mode", "full") and peaks[-1] == peak()
    assert peaks == sorted(set(peaks))


def test_without_a_compiler_more_is_kept():
    assert peak("--compile.enable", "false") > peak()


def test_experts_keep_their_inputs_and_pre_activations_alone():
    file = "benchmarks/configs/moe_7b.toml"
    words = ("--training.local_batch_size", "1")
    assert (
        peak("--activation_checkpoint.mode", "full", *words, file=file)
        < peak("--activation_checkpoint.mode", "experts", *words, file=file)
        < peak(*words, file=file)
    )


@pytest.mark.parametrize("words, world", [
    ((), 4),
    (("--parallelism.tensor_parallel_degree", "2"), 2),
    (("--parallelism.context_parallel_degree", "2"), 2),
    (("--parallelism.pipeline_parallel_degree", "2"), 2),
], ids=["FSDP", "TP", "CP", "PP"])  # fmt: skip
def test_more_ranks_hold_less(words, world):
    assert peak("--training.global_batch_size", "16", *words, world=world) < peak("--training.global_batch_size", "16")


def test_gradients_of_an_earlier_micro_batch_are_there_at_the_loss():
    one, two = (estimate(config_of("--training.local_batch_size", n), 1, COUNTED) for n in ("4", "2"))
    assert "gradients" not in one.parts() and "gradients" in two.parts()


def test_the_coefficients_have_a_provenance():
    table = coefficient_table()
    assert set(table["coefficients"]) == set(NAMES)
    assert len(table["fitted_on"]) <= 8
    assert provenance().startswith("fitted on" if table["fitted_on"] else "unfitted")


def test_advice_is_the_best_of_each_kind_and_saves_what_it_says():
    config = config_of()
    found = advice(config, 1)
    assert len(found) == 3
    assert [s.saved for s in found] == sorted((s.saved for s in found), reverse=True)
    for switch in found:
        words = [word for key, value in switch.changes.items() for word in (f"--{key}", str(value).lower())]
        assert estimate(config_of(*words), 1).peak == switch.peak == estimate(config, 1).peak - switch.saved


def test_offloaded_states_are_on_the_device_three_pieces_at_a_time():
    def update(file, *words):
        config = config_of("--optimizer.state_offload", "true", *words, file=file)
        moments = {moment.name: moment.parts for moment in estimate(config, 1, COUNTED).moments}
        return next(part.size for part in moments["in the optimizer step"] if part.name == "update")

    down, norms, head = 4096 * 14336, 3 * 4096, 128_256 * 4096  # of Llama 3 8B, at its end: each is a piece
    assert update("benchmarks/configs/dense_8b.toml") == 8 * (down + norms + head)
    small = "train_configs/debug_cpu.toml"  # all of it is one piece
    config = config_of(file=small)
    assert update(small) == held_by(config, mesh_degrees(config, 1), None).optimizer_states


def test_pieces_of_states_hold_every_state_once():
    for file in ("benchmarks/configs/dense_8b.toml", "benchmarks/configs/moe_7b.toml", "train_configs/debug_moe.toml"):
        config = config_of("--training.local_batch_size", "1", file=file)
        shape = resolve_shape(config.model, config.moe)
        assert sum(state_pieces(shape, None, 1, 1, None)) == memory(shape, "AdamW").optimizer_states
        assert sum(state_pieces(shape, None, 4, 2, None)) == memory(shape, "AdamW", 4, tensor_degree=2).optimizer_states


def test_what_is_on_already_or_refused_is_not_advised():
    words = ("--activation_checkpoint.mode", "full", "--optimizer.name", "SGD", "--training.local_batch_size", "1")
    keys = {key for switch in advice(config_of(*words), 1, most=10) for key in switch.changes}
    assert keys and not keys & {"activation_checkpoint.mode", "optimizer.state_dtype", "training.local_batch_size"}


def test_what_the_rules_refuse_beside_the_rest_is_not_advised():
    for degree, there in (("1", True), ("2", False)):
        words = ("--training.global_batch_size", "8", "--parallelism.tensor_parallel_degree", degree)
        keys = {key for switch in advice(config_of(*words), 2, most=10) for key in switch.changes}
        assert ("activation_checkpoint.offload" in keys) == there


def test_the_sentence_names_three_switches_with_gib():
    sentence = advice_sentence(config_of(), 1)
    assert sentence.startswith("; by the estimate (") and sentence.count(" GiB)") == 3
    assert 'activation_checkpoint.mode = "full"' in sentence
