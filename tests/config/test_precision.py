"""Rules of float8, of bfloat16 moments and of the compiled update; what only the machine can tell."""

import pytest

from config.errors import ConfigError
from config.load import load_file, to_toml
from config.precision import check_float8_on
from config.precision_schema import LINEAR
from config.schema import Config
from tests.config.refusal import refusal

ON = {"model.converters": [LINEAR]}
FLOAT8 = "quantize.linear.float8"
GATHER = f"{FLOAT8}.enable_fsdp_float8_all_gather"


def load(folder, keys):
    (folder / "a.toml").write_text("")
    return load_file(folder / "a.toml", keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model.converters": ["quantize.linear.flat8"]}, f'"quantize.linear.flat8" - did you mean "{LINEAR}"?'),
        ({"model.converters": ["quantize.grouped_mm.float8"]}, "Experts stay in the compute dtype"),
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
