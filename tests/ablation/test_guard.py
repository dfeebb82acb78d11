"""The guard: each way of changing more, or less, than one declared variable is refused with the key and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from ablation.differences import is_inert
from ablation.guard import Guarded, guard
from ablation.question import read
from config.errors import ConfigError

BASE = """
[training]
steps = 100
seq_len = 128
global_batch_size = 8
[validation]
enable = true
freq = 50
"""

HEAD = """
base = "base.toml"
[ablation]
variable = "optimizer.lr"
baseline = "low"
seeds = [1, 2, 3]
decide = { metric = "validation_metrics/loss", step = 100 }
"""

ARMS = """
[arms.low]
optimizer.lr = 1e-3
[arms.high]
optimizer.lr = 2e-3
"""

# A baseline that is the file itself, as a factorial and a ladder want it.
EMPTY = """
[arms.low]
[arms.high]
optimizer.lr = 2e-3
"""


@pytest.fixture
def guarded(tmp_path: Path):
    """Guard a question given as text; ``base`` is its base file."""

    def build(text: str, base: str = BASE, **options) -> Guarded:
        (tmp_path / "base.toml").write_text(base)
        path = tmp_path / "question.toml"
        path.write_text(text)
        return guard(read(path), **options)

    return build


def only(result: Guarded) -> str:
    assert len(result.violations) == 1, result.violations
    return result.violations[0]


def with_variable(variable: str, design: str = "") -> str:
    head = HEAD.replace('"optimizer.lr"', variable)
    return head.replace("[ablation]", f'[ablation]\ndesign = "{design}"') if design else head


def test_one_declared_variable_is_accepted(guarded):
    result = guarded(HEAD + ARMS).accepted()
    assert result.arms["high"].changes == {"optimizer.lr": (1e-3, 2e-3)}
    assert result.arms["high"].derived == {} and result.arms["low"].changes == {}


def test_two_changed_leaves(guarded):
    result = guarded(HEAD + ARMS + "optimizer.weight_decay = 0.0\n")
    two, undeclared = result.violations
    assert two.startswith(
        'arms.high: changes 2 keys against "low" (optimizer.lr: 0.001 -> 0.002, optimizer.weight_decay'
    )
    assert "which is not declared: ablation.variable is optimizer.lr" in undeclared
    with pytest.raises(ConfigError, match="question.toml: arms.high"):
        result.accepted()


def test_undeclared_key(guarded):
    message = only(guarded(HEAD + "[arms.low]\n[arms.high]\noptimizer.weight_decay = 0.0\n"))
    assert message == (
        "arms.high: changes optimizer.weight_decay (0.1 -> 0.0), which is not declared: "
        "ablation.variable is optimizer.lr"
    )


@pytest.mark.parametrize("second", ["optimizer.lr = 1e-3", ""], ids=["same value", "empty table, same as the file"])
def test_arm_equal_to_the_baseline(guarded, second):
    text = HEAD + "[optimizer]\nlr = 1e-3\n[arms.low]\noptimizer.lr = 1e-3\n[arms.high]\n" + second
    assert only(guarded(text)) == 'arms.high: equal to the baseline "low"'


def test_two_arms_alike(guarded):
    message = only(guarded(HEAD + ARMS + "[arms.twin]\noptimizer.lr = 2e-3\n"))
    assert message == 'arms.twin: the same configuration as arm "high"'


def test_cyclic_base(guarded):
    assert "base is circular" in only(guarded(HEAD + ARMS, base='base = "question.toml"\n'))


def test_unknown_metric(guarded):
    message = only(guarded(HEAD.replace("validation_metrics/loss", "validation_metrics/los") + ARMS))
    assert 'unknown metric - did you mean "validation_metrics/loss"?' in message


@pytest.mark.parametrize("seeds", ["[]", "[1]"])
def test_fewer_than_two_seeds(guarded, seeds):
    assert "fewer than two seeds give no interval" in only(guarded(HEAD.replace("[1, 2, 3]", seeds) + ARMS))


def test_one_seed_with_n1_ok(guarded):
    guarded(HEAD.replace("[1, 2, 3]", "[1]\nn1_ok = true") + ARMS).accepted()


def test_a_seed_twice(guarded):
    assert "a seed is there twice" in only(guarded(HEAD.replace("[1, 2, 3]", "[1, 2, 1]") + ARMS))


def test_unset_global_batch(guarded):
    assert only(guarded(HEAD + ARMS, base=BASE.replace("global_batch_size = 8", ""))).startswith(
        "training.global_batch_size is unset (-1"
    )


def test_pinned_seeds_leave_no_replicates(guarded):
    message = only(guarded(HEAD + ARMS, base=BASE + "[debug]\ninit_seed = 1\ndata_seed = 1\n"))
    assert "every seed would be the same run" in message


@pytest.mark.parametrize(
    ("step", "said"),
    [(150, "beyond training.steps = 100"), (60, "use 50 or 100"), (1, "use 50")],
)
def test_decision_at_a_step_without_the_metric(guarded, step, said):
    assert said in only(guarded(HEAD.replace("step = 100", f"step = {step}") + ARMS))


def test_every_arm_reaches_the_decision(guarded):
    arms = "[arms.low]\n[arms.high]\ntraining.steps = 50\n"
    assert "decide.step = 100: beyond training.steps = 50" in only(guarded(with_variable('"training.steps"') + arms))


def test_a_key_is_inert_under_a_parent_that_is(guarded):
    flat = {"optimizer.stochastic_rounding": True, "optimizer.state_dtype": "bfloat16", "optimizer.name": "AdamW"}
    assert not is_inert("optimizer.stochastic_rounding", flat)
    assert is_inert("optimizer.stochastic_rounding", flat | {"optimizer.state_dtype": "float32"})
    assert is_inert("optimizer.stochastic_rounding", flat | {"optimizer.name": "SGD"})


def test_decision_on_validation_that_is_off(guarded):
    message = only(guarded(HEAD + ARMS, base=BASE.replace("enable = true", "enable = false")))
    assert "needs validation.enable = true" in message


def test_unknown_names_are_guessed(guarded):
    text = HEAD.replace('baseline = "low"', 'baseline = "lov"\nreferences = ["hihg"]') + ARMS
    found = guarded(text).violations
    assert 'ablation.baseline = "lov": no such arm - did you mean "low"?' in found
    assert 'ablation.references = "hihg": no such arm - did you mean "high"?' in found


def test_every_violation_is_named(guarded):
    text = HEAD.replace("[1, 2, 3]", "[1, 1]").replace("step = 100", "step = 7") + ARMS.replace(
        "lr = 2e-3", "eps = 1e-6"
    )
    found = "\n".join(guarded(text, base=BASE.replace("global_batch_size = 8", "")).violations)
    for part in ("a seed is there twice", "step = 7", "optimizer.eps", "global_batch_size is unset"):
        assert part in found


def test_mistakes_of_the_file_and_of_the_question_together(guarded):
    found = "\n".join(
        guarded(HEAD.replace("[1, 2, 3]", "[1]") + ARMS + "optimizer.lrr = 1.0\n[trainin]\nx = 1").violations
    )
    for part in ("fewer than two seeds", "lrr", "trainin"):
        assert part in found


def test_unknown_variable(guarded):
    found = guarded(with_variable('"optimizer.learning_rate"') + ARMS).violations
    assert any(v.startswith('ablation.variable: "optimizer.learning_rate": unknown key') for v in found)


@pytest.mark.parametrize("key", ["debug.seed", "job.run_dir"])
def test_the_runners_keys_are_no_variable(guarded, key):
    assert any("set by the runner for each run" in v for v in guarded(with_variable(f'"{key}"') + ARMS).violations)


def test_companions_follow_their_parent(guarded):
    arms = '[arms.low]\n[arms.high]\ncompile.enable = true\ncompile.backend = "eager"\n'
    result = guarded(with_variable('"compile.enable"') + arms).accepted()
    assert result.arms["high"].changes == {"compile.enable": (False, True)}
    assert result.arms["high"].companions == {"compile.backend": ("inductor", "eager")}


def test_a_companion_alone_counts_once(guarded):
    off = '[arms.low]\n[arms.high]\ncompile.enable = true\ncompile.backend = "eager"\n'
    two = off + 'compile.components = ["loss"]\n'
    base = BASE + "[compile]\nenable = true\n"
    assert guarded(with_variable('"compile.enable"') + off, base=base).accepted()
    assert "changes 2 keys" in only(guarded(with_variable('"compile.enable"') + two, base=base))


def test_a_companion_without_effect(guarded):
    arms = '[arms.low]\n[arms.high]\noptimizer.lr = 2e-3\ncompile.backend = "eager"\n'
    assert only(guarded(HEAD + arms)) == "arms.high: compile.backend has no effect while compile.enable = false"


def test_derived_changes_are_listed_apart(guarded):
    arms = "[arms.low]\n[arms.high]\ntraining.seq_len = 256\n"
    arm = guarded(with_variable('"training.seq_len"') + arms).accepted().arms["high"]
    assert arm.changes == {"training.seq_len": (128, 256)}
    assert arm.derived["tokens_per_step"] == (1024, 2048)


def test_hold_lets_a_key_follow_as_far_as_it_holds(guarded):
    head = with_variable('"training.seq_len"').replace(
        "[ablation]", '[ablation]\nhold = { "training.global_batch_size" = "tokens_per_step" }'
    )
    base = BASE.replace("global_batch_size = 8", "global_batch_size = 16")
    arms = "[arms.low]\n[arms.high]\ntraining.seq_len = 256\ntraining.global_batch_size = "
    arm = guarded(head + arms + "8\n", base=base).accepted().arms["high"]
    assert arm.held == {"training.global_batch_size": (16, 8)} and "tokens_per_step" not in arm.derived
    assert "tokens_per_step 2048 -> 4096" in only(guarded(head + arms + "16\n", base=base))
    assert "tokens_per_step 2048 -> 8192" in only(guarded(head + arms + "32\n", base=base))  # it follows, the wrong way


def test_two_variables_need_a_design(guarded):
    assert (
        "2 keys, an ablation changes one"
        in guarded(with_variable('["optimizer.lr", "optimizer.eps"]') + ARMS).violations[0]
    )


def test_factorial_makes_every_combination(guarded):
    arms = EMPTY + "[arms.higher]\noptimizer.lr = 3e-3\n[arms.wd0]\noptimizer.weight_decay = 0.0\n"
    result = guarded(with_variable('["optimizer.lr", "optimizer.weight_decay"]', "factorial") + arms).accepted()
    assert list(result.arms) == ["low", "high", "higher", "wd0", "high+wd0", "higher+wd0"]
    assert result.arms["high+wd0"].changes == {"optimizer.lr": (8e-4, 2e-3), "optimizer.weight_decay": (0.1, 0.0)}
    both = arms + "optimizer.lr = 5e-3\n"
    assert (
        "arms.wd0: changes 2 keys"
        in guarded(with_variable('["optimizer.lr", "optimizer.weight_decay"]', "factorial") + both).violations[0]
    )


def test_ladder_adds_one_key_a_rung(guarded):
    head = with_variable('["optimizer.lr", "optimizer.weight_decay"]', "ladder")
    arms = EMPTY + "[arms.wd0]\noptimizer.weight_decay = 0.0\n"
    result = guarded(head + arms).accepted()
    assert list(result.arms) == ["low", "high", "high+wd0"]
    assert "no arm changes optimizer.weight_decay" in only(guarded(head + EMPTY))
    assert "the baseline of a ladder is empty" in guarded(head + ARMS).violations[0]


def test_aa_alone_needs_no_variable(guarded):
    head = HEAD.replace('variable = "optimizer.lr"', "aa = true")
    result = guarded(head + "[arms.low]\n").accepted()
    assert result.question.aa_seeds == [4, 5, 6]
    assert any("ablation.variable: unset" in v for v in guarded(head + ARMS).violations)


@pytest.mark.parametrize(
    ("tune", "said"),
    [
        ('{ "optimizer.lr" = [1e-4, 1e-3] }', "it can be neither tuned nor held"),
        ('{ "optimizer.eps" = [1e-8] }', "two or more different values"),
        ('{ "optimizer.eps" = [1e-8, -1.0] }', "must be at least 0"),
        ('{ "optimizer.epz" = [1e-8, 1e-7] }', "unknown key"),
    ],
)
def test_tune_grid(guarded, tune, said):
    found = guarded(HEAD.replace("[ablation]", f"[ablation]\ntune = {tune}") + ARMS).violations
    assert any(said in v for v in found), found


def test_an_arm_may_not_set_what_is_tuned(guarded):
    head = HEAD.replace("[ablation]", '[ablation]\ntune = { "optimizer.eps" = [1e-8, 1e-7] }')
    assert any(
        "every arm is run on the same grid" in v for v in guarded(head + ARMS + "optimizer.eps = 1e-7\n").violations
    )


def test_an_override_reaches_every_arm(guarded):
    result = guarded(HEAD + ARMS, overrides={"optimizer.weight_decay": 0.3}).accepted()
    assert {arm.flat["optimizer.weight_decay"] for arm in result.arms.values()} == {0.3}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"optimizer.lr": 1.0}, 'command line: --optimizer.lr: arm "low" sets it'),
        ({"debug.seed": 3}, "command line: --debug.seed: set by the runner"),
    ],
)
def test_an_override_that_arms_or_the_runner_set(guarded, overrides, said):
    assert only(guarded(HEAD + ARMS, overrides=overrides)).startswith(said)


def test_an_override_on_one_arm_only(guarded):
    text = with_variable('"compile.enable"') + "[arms.low]\n[arms.high]\ncompile.enable = true\n"
    message = only(guarded(text, overrides={"compile.backend": "eager"}))
    assert message.startswith(
        'command line: --compile.backend: has no effect in arm "low"; an override must reach every'
    )
