"""What a user reads: values with origins, differences, the dry run."""

import pytest

from config.arithmetic import parameter_counts
from config.errors import ConfigError
from config.flavors import resolve_shape
from config.load import flatten, load, load_file
from config.render import render, render_diff, render_dry_run


def test_show_has_every_value_with_its_origin_and_loads_again(tmp_path):
    (tmp_path / "base.toml").write_text("[training]\nsteps = 10\n")
    (tmp_path / "a.toml").write_text('base = "base.toml"\n[model]\nflavor = "debug"\n')
    resolved = load(["--job.config_file", str(tmp_path / "a.toml"), "--debug.seed", "7"])
    lines = [" ".join(line.split()) for line in render(resolved).splitlines()]
    assert 'model.flavor = "debug" # a.toml' in lines
    assert "training.steps = 10 # base.toml" in lines
    assert "debug.seed = 7 # command line" in lines
    assert "# debug.data_seed = 7 # from debug.seed" in lines
    assert "# model.dim = 128 # from flavor debug" in lines
    assert "# moe.* = unused # flavor debug has no experts" in lines
    (tmp_path / "shown.toml").write_text(render(resolved))
    again, now = flatten(load_file(tmp_path / "shown.toml").config), flatten(resolved.config)
    assert {k: v for k, v in again.items() if k != "job.config_file"} == {
        k: v for k, v in now.items() if k != "job.config_file"
    }


def test_comments_are_aligned_within_a_section():
    for block in render(load(["--job.description", "a" * 100])).split("\n\n"):
        lines = [line for line in block.splitlines() if "a" * 100 not in line]
        assert len({line.index(" = ") for line in lines}) == 1
        assert len({line.rindex("  # ") for line in lines}) == 1


def test_diff_names_what_was_set_and_apart_from_it_what_follows():
    a, b = load(["--model.flavor", "1B"]), load(["--model.flavor", "1B_untied", "--debug.init_seed", "0"])
    text = render_diff(a, b, ("A", "B"))
    set_part, follows = text.split("what follows")
    assert set_part.startswith("1 key differs, A = A -> B = B\n")
    assert "model.flavor" in set_part and '"1B" -> "1B_untied"' in set_part
    assert "init_seed" not in text, "it follows from debug.seed in A and is the same"
    assert (
        follows.split() == "model.enable_weight_tying true -> false # from flavor 1B -> from flavor 1B_untied".split()
    )
    assert render_diff(a, a, ("x", "y")) == "x and y say the same."


def test_dry_run_says_parameters_flops_tokens_and_memory():
    words = ["--model.flavor", "8B", "--training.seq_len", "8192", "--training.local_batch_size", "2"]
    text = render_dry_run(load([*words, "--training.global_batch_size", "32"]), 8)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert any(r.startswith("parameters 8,030,261,248 # embedding 525,336,576 + blocks") for r in rows)
    assert any(r.startswith("FLOPs a token 57.914 GFLOP # torchtitan's formula") for r in rows)
    assert "== Step: 8 ranks: dp_replicate(1) x dp_shard(8)" in rows
    assert any(r.startswith("gradient accumulation steps 2 #") for r in rows)
    assert any(r.startswith("tokens per step 262,144 #") for r in rows)
    assert "parameters 3.739 GiB" in rows and "optimizer states 7.479 GiB # AdamW, float32" in rows
    assert "training.seq_len                = 8192        # command line" in text


def test_dry_run_of_experts_says_what_a_token_meets():
    config = load(["--model.name", "moe", "--model.flavor", "debug_moe"])
    text = render_dry_run(config, 1)
    counts = parameter_counts(resolve_shape(config.config.model, config.config.moe))
    assert counts.active < counts.total and f"{counts.active:,}" in text
    assert "# moe.top_k" in text, "what follows from the flavor is shown"


def test_dry_run_names_what_is_missing_here_and_refuses_what_cannot_be():
    resolved = load(["--job.dry_run", "--model.hf_assets_path", "/none"])
    assert 'not on this machine: model.hf_assets_path = "/none"' in render_dry_run(resolved, 1)
    with pytest.raises(ConfigError, match="does not divide WORLD_SIZE 3"):
        render_dry_run(load(["--parallelism.data_parallel_replicate_degree", "2"]), 3)
