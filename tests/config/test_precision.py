"""Rules of float8, of bfloat16 moments and of the compiled update; what only the machine can tell."""

import pytest

from config.errors import ConfigError
from config.load import load_file, to_toml
from config.precision import check_float8_on
from config.precision_schema import GROUPED, LINEAR
from config.schema import Config
from tests.config.refusal import refusal

ON = {"model.converters": [LINEAR]}
FLOAT8 = "quantize.linear.float8"
GROUPED_FQNS = f"{GROUPED}.fqns"
MOE = {"model.name": "moe", "model.flavor": "debug_moe"}
EXPERTS = MOE | {"model.converters": [GROUPED], GROUPED_FQNS: ["experts"]}
GATHER = f"{FLOAT8}.enable_fsdp_float8_all_gather"


def load(folder, keys):
    (folder / "a.toml").write_text("")
    return load_file(folder / "a.toml", keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model.converters": ["quantize.linear.flat8"]}, f'"quantize.linear.flat8" - did you mean "{LINEAR}"?'),
        (EXPERTS | {GROUPED_FQNS: []}, "converts nothing: no path of experts (layers.0.moe.experts, ...)"),
        (EXPERTS | {GROUPED_FQNS: ["shared"]}, "converts nothing: no path of experts"),
        (EXPERTS | {"moe.hidden_dim": 72}, "multiples of 16"),
        (EXPERTS | {"moe.experts": "loop"}, "it is the grouped products that take float8"),
        (EXPERTS | {"moe.experts": "quack"}, "it is the grouped products that take float8"),
        (EXPERTS | {"training.mixed_precision_param": "float32"}, "float8 products give bfloat16"),
        (EXPERTS | {"parallelism.tensor_parallel_degree": 2}, "results would be those of the layout"),
        (ON | {f"{FLOAT8}.filter_fqns": ["layers", "attention", "feed_forward"]}, "converts nothing"),
        (ON | {f"{FLOAT8}.filter_fqns": ["auto_filter_small_kn"]}, "converts nothing"),
        (ON | {"model.dim": 40, "model.n_heads": 4, "model.head_dim": 10, "model.n_kv_heads": 4}, "converts nothing"),
        (ON | {"parallelism.tensor_parallel_degree": 2}, "parallel styles of its own"),
        (
            ON
            | {
                "parallelism.pipeline_parallel_degree": 2,
                "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble",
            },
            "runs a float8 layer's backward pass twice",
        ),
        (ON | {GATHER: True, f"{FLOAT8}.recipe_name": "rowwise"}, "one scale a tensor"),
        (ON | {GATHER: True, "parallelism.zero_stage": 0}, "FSDP2 holds nothing"),
        (ON | {f"{FLOAT8}.emulate": True, "compile.enable": True}, "does not compile"),
        ({"optimizer.name": "Adam", "optimizer.state_dtype": "bfloat16"}, "AdamW alone keeps its moments"),
        (
            {"optimizer.name": "SGD", "compile.enable": True, "compile.components": ["optimizer"]},
            "AdamW's update alone is compiled",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, keys, message):
    (tmp_path / "a.toml").write_text("")
    assert message in refusal(tmp_path, load_file, tmp_path / "a.toml", keys)


def test_emulation_goes_with_a_compiled_loss(tmp_path):
    keys = ON | {f"{FLOAT8}.emulate": True, "compile.enable": True, "compile.components": ["loss"]}
    assert not any("float8" in note for note in load(tmp_path, keys).notes)


def test_float8_without_compiled_blocks_is_named_slow(tmp_path):
    assert any("slower than bfloat16" in note for note in load(tmp_path, ON).notes)
    assert not any("slower than bfloat16" in note for note in load(tmp_path, ON | {"compile.enable": True}).notes)


def test_nested_keys_survive_a_round_trip_and_are_inert_without_their_converter(tmp_path):
    resolved = load(tmp_path, ON | {f"{FLOAT8}.recipe_name": "rowwise"})
    (tmp_path / "b.toml").write_text(to_toml(resolved.config))
    again = load_file(tmp_path / "b.toml").config
    again.job.config_file = resolved.config.job.config_file
    assert again == resolved.config and again.quantize.linear.float8.recipe_name == "rowwise"
    (note,) = [n for n in load(tmp_path, {f"{FLOAT8}.recipe_name": "rowwise"}).notes if "rowwise" in n or FLOAT8 in n]
    assert "has no effect while model.converters = []" in note


def test_experts_may_stay_whole_under_tensor_parallelism_and_be_emulated_in_float32(tmp_path):
    spread = {"parallelism.tensor_parallel_degree": 2, "parallelism.expert_parallel_degree": 2}
    load(tmp_path, EXPERTS | spread)
    load(tmp_path, EXPERTS | {f"{GROUPED}.emulate": True, "training.mixed_precision_param": "float32"})


def test_a_key_matters_while_its_converter_is_one_of_several(tmp_path):
    keys = EXPERTS | {"model.converters": [LINEAR, GROUPED], f"{FLOAT8}.recipe_name": "rowwise"}
    assert not any("no effect" in note for note in load(tmp_path, keys).notes)
    notes = load(tmp_path, keys | {"model.converters": [LINEAR]}).notes
    assert [n.split()[0] for n in notes if "no effect" in n] == [GROUPED_FQNS]


def test_a_dense_twin_leaves_float8_experts_unread_and_says_so(tmp_path):
    found = load(tmp_path, EXPERTS | {"model.flavor": "debug_moe_dense"})
    assert any("has no effect: flavor debug_moe_dense has no experts" in note for note in found.notes)
    check_float8_on(found.config, "cpu", (0, 0), "")
    assert not any("no experts" in note for note in load(tmp_path, EXPERTS).notes)


def test_devices_that_cannot():
    config = Config()
    config.model.converters = [LINEAR]
    check_float8_on(config, "cuda", (8, 9), "")
    for device, capability, part in (("cpu", (0, 0), "a CPU does not"), ("cuda", (8, 6), "this GPU (8.6) does not")):
        with pytest.raises(ConfigError, match=r"emulate = true") as caught:
            check_float8_on(config, device, capability, "")
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=r"pip install -e"):
        check_float8_on(config, "cuda", (9, 0), "ModuleNotFoundError: No module named 'torchao'")
    config.quantize.linear.float8.emulate = True
    check_float8_on(config, "cpu", (0, 0), "")


def test_devices_that_cannot_have_experts_in_float8():
    config = Config()
    config.model.name, config.model.flavor, config.model.converters = "moe", "debug_moe", [GROUPED]
    check_float8_on(config, "cuda", (9, 0), "")
    check_float8_on(config, "cuda", (9, 0), "ModuleNotFoundError: No module named 'torchao'")
    found = (("cpu", (0, 0), "a CPU does"), ("cuda", (8, 9), "(8.9) does"), ("cuda", (10, 0), "(10.0) does"))
    for device, capability, part in found:
        with pytest.raises(ConfigError, match=r"emulate = true") as caught:
            check_float8_on(config, device, capability, "")
        assert f"{part} not have grouped products in float8" in str(caught.value)
    config.quantize.grouped_mm.float8.emulate = True
    check_float8_on(config, "cpu", (0, 0), "")
