"""Rules between keys: each broken one with its numbers, where they came from and the way out."""

import pytest

from config.load import load, load_file
from config.rules import effective
from tests.config.refusal import refusal


def refused(folder, text: str) -> str:
    (folder / "a.toml").write_text(text)
    return refusal(folder, load_file, folder / "a.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[model]\nn_kv_heads = 3",
            "model.n_heads = 4 (flavor debug) is not divisible by model.n_kv_heads = 3 (a.toml). Each key",
        ),
        ("[model]\nhead_dim = 33", "model.head_dim = 33 (a.toml) is odd"),
        ("[model]\ndim = 130", "model.dim = 130 (a.toml) is not divisible by model.n_heads = 4 (flavor debug)"),
        (
            "[training]\nseq_len = 4096",
            "training.seq_len = 4096 (a.toml) is longer than the model allows: model.max_seq_len = 2048 (flavor debug)",
        ),
        (
            "[training]\nglobal_batch_size = 20\nlocal_batch_size = 8",
            "training.global_batch_size = 20 (a.toml) is not divisible by training.local_batch_size = 8 (a.toml)."
            " Nearest that are: 16, 24.",
        ),
        ("[training]\nglobal_batch_size = 0", "global_batch_size = 0 (a.toml): must be at least 1, or -1"),
        (
            "[parallelism]\ndata_parallel_shard_degree = 0",
            "data_parallel_shard_degree = 0 (a.toml): must be at least 1",
        ),
        ("[validation]\nsteps = 0", "validation.steps = 0 (a.toml): must be at least 1, or -1"),
        (
            "[validation]\nenable = true\n[data]\nholdout_percent = 0",
            "validation.enable = true (a.toml) needs held-out documents, and data.holdout_percent = 0.0 (a.toml)",
        ),
        ('[data]\ncorpus = "text"', 'data.corpus = "text" (a.toml) needs data.path, which is empty'),
        ('[data]\ncorpus = "hf"', "needs data.name, which is empty"),
        ('[data]\ncorpus = "mixture"', "needs data.sources, which is empty"),
        ('[data]\ncorpus = "pyhton"', 'expected one of "python", "text", "hf", "mixture" - did you mean "python"?'),
        ('[data]\ntokenizer = "file"', 'data.tokenizer = "file" (a.toml) needs model.hf_assets_path'),
        (
            "[data]\ntokenizer_vocab_size = 5000",
            "data.tokenizer_vocab_size = 5000 (a.toml) is larger than model.vocab_size = 4096 (flavor debug)",
        ),
        ("[optimizer]\nbeta2 = 1", "optimizer.beta2 = 1.0 (a.toml): must be below 1"),
        ('[activation_checkpoint]\nselective_ac_option = "ops"', 'expected "op", or a whole number'),
        ('[compile]\nbackend = "inductr"', 'unknown backend - did you mean "inductor"?'),
        ("[compile]\nenable = true\ncomponents = []", "compile.components is empty"),
        ('[metrics]\nsave_tb_folder = "../tb"', "expected a folder inside the run directory"),
        (
            '[model]\nflavor = "8b"',
            'model.flavor = "8b": no flavor of llama3 - did you mean "8B"?; known: "debug"',
        ),
        ('[model]\nflavor = "debug_moe"', 'model.flavor = "debug_moe" belongs to model.name = "moe"; set both'),
        ('[model]\nname = "lama3"', 'model.name = "lama3": unknown model family - did you mean "llama3"?'),
    ],
)
def test_a_broken_rule_names_numbers_origins_and_the_way_out(tmp_path, text, message):
    assert message in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{ corpus = "python" }', "data.sources, table 1: weight is missing"),
        ("{ weight = 1 }", "table 1: corpus is missing"),
        ('{ corpus = "python", weight = 0 }', "weight = 0: expected a number above 0"),
        ('{ corpus = "python", weight = 1, pth = "x" }', "pth: unknown key - did you mean 'path'?"),
        ('{ corpus = "pyton", weight = 1 }', 'corpus = "pyton": expected one of'),
        ('{ corpus = "mixture", weight = 1 }', "a mixture does not nest"),
        ('{ corpus = "text", weight = 1 }', 'corpus = "text" needs path'),
    ],
)
def test_tables_of_a_mixture_are_checked(tmp_path, source, message):
    assert message in refused(tmp_path, f'[data]\ncorpus = "mixture"\nsources = [{source}]\n')


def test_every_broken_rule_is_reported_at_once(tmp_path):
    assert len(refused(tmp_path, "[model]\nn_kv_heads = 3\n[training]\nseq_len = 4096\n").splitlines()) == 2


def test_what_is_unset_follows_with_its_rule():
    config = load(
        ["--model.flavor", "debug", "--model.dim", "256", "--debug.seed", "7", "--debug.data_seed", "9"]
    ).config
    follows = effective(config)
    assert follows["model.n_layers"] == (4, "flavor debug")
    assert follows["model.head_dim"] == (64, "dim / n_heads")
    assert follows["debug.init_seed"] == (7, "debug.seed")
    assert follows["lr_scheduler.total_steps"] == (config.training.steps, "training.steps")
    assert "debug.data_seed" not in follows and "model.dim" not in follows


def test_schedules_that_do_not_fit_are_noted():
    long_warmup = load(["--training.steps", "5", "--lr_scheduler.warmup_steps", "10"]).notes
    assert any("warmup_steps = 10 fills all 5 steps" in note for note in long_warmup)
    decay = load(
        ["--training.steps", "10", "--lr_scheduler.warmup_steps", "4", "--lr_scheduler.decay_ratio", "0.8"]
    ).notes
    assert any("the decay takes the 6 left" in note for note in decay)
    short = load(["--training.steps", "300", "--lr_scheduler.total_steps", "250"]).notes
    assert any("the last 50 steps stay at the final rate" in note for note in short)
    assert load(["--training.steps", "300"]).notes == []


def test_experts_of_a_dense_flavor_are_noted():
    assert load(["--moe.balance", "none"]).notes == ["moe.balance has no effect: flavor debug has no experts"]
    spread = "parallelism.expert_parallel_degree = 2 has no effect: flavor debug has no experts"
    assert load(["--parallelism.expert_parallel_degree", "2"]).notes == [spread]
    assert load(["--moe.balance", "none", "--model.name", "moe", "--model.flavor", "debug_moe"]).notes == []
