"""Each refused way to save memory has a configuration that meets it, and no other refusal."""

import pytest

from config.errors import ConfigError
from config.layouts import check_layout_on
from config.load import load, load_file
from config.refused_layouts import REFUSED
from config.refused_memory import MEMORY
from config.world import check_world
from tests.config.refusal import refusal

MODE, OFFLOAD = "activation_checkpoint.mode", {"activation_checkpoint.offload": True}
TP, SHARDS, STATES = "parallelism.tensor_parallel_degree", "training.enable_cpu_offload", "optimizer.state_offload"
EXPERTS = {"model.name": "moe", "model.flavor": "debug_moe"}
COMPILED = {"compile.enable": True}
MET = {
    "memory budget without compiled blocks": [
        {MODE: "memory_budget"},
        {MODE: "memory_budget", **COMPILED, "compile.components": ["loss"]},
        {MODE: "memory_budget", **COMPILED, "compile.backend": "eager"},
    ],
    "nested checkpointing of compiled blocks": [{MODE: "nested", **COMPILED}],
    "checkpointing around experts without any": [{MODE: "experts"}],
    "TP with compiled blocks and checkpointing around experts": [{MODE: "experts", **EXPERTS, **COMPILED, TP: 2}],
    "activation offload with another choice of what to keep": [
        {**OFFLOAD, MODE: "selective"},
        {**OFFLOAD, MODE: "nested"},
    ],
    "activation offload with TP": [{**OFFLOAD, TP: 2}],
    "activation offload with EP": [{**OFFLOAD, **EXPERTS, "parallelism.expert_parallel_degree": 2}],
    "activation offload with zero bubble": [
        {
            **OFFLOAD,
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_parallel_schedule": "InterleavedZeroBubble",
        }
    ],
    "CPU offload without FSDP2": [
        {SHARDS: True, "parallelism.zero_stage": 1},
        {SHARDS: True, "parallelism.data_parallel_shard_degree": 1},
        {SHARDS: True, "parallelism.fsdp_version": 1},
    ],
    "CPU offload with TP, EP or a pipeline": [
        {SHARDS: True, TP: 2},
        {SHARDS: True, **EXPERTS, "parallelism.expert_parallel_degree": 2},
        {SHARDS: True, "parallelism.pipeline_parallel_degree": 2},
    ],
    "CPU offload with float8 all-gather": [
        {
            SHARDS: True,
            "model.converters": ["quantize.linear.float8"],
            "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
        }
    ],
    "states offloaded twice": [{SHARDS: True, STATES: True}],
    "offload of states with ZeRO 1": [{STATES: True, "parallelism.zero_stage": 1}],
    "offload of states with a compiled update": [{STATES: True, **COMPILED, "compile.components": ["optimizer"]}],
    "offload of states in bfloat16": [{STATES: True, "optimizer.state_dtype": "bfloat16"}],
    "offload of states that an optimizer does not keep": [{STATES: True, "optimizer.name": "SGD"}],
}
CASES = [(layout, number) for layout, values in MET.items() for number in range(len(values))]
ENOUGH = {  # pipelines have rules of their own
    "model.n_layers": 6,
    "training.local_batch_size": 8,
    "parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "parallelism.pipeline_parallel_last_stage_less_layers": 0,
}


@pytest.mark.parametrize(("layout", "number"), CASES)
def test_it_is_refused_by_name_with_its_reason(tmp_path, layout, number):
    (tmp_path / "a.toml").write_text("")
    (expected,) = [r for r in MEMORY if r.layout == layout]
    values = MET[layout][number]
    pipeline = ENOUGH if any("pipeline" in key for key in values) else {}
    message = refusal(tmp_path, load_file, tmp_path / "a.toml", values | pipeline)
    assert f": {expected.reason}" in message
    assert [r.layout for r in REFUSED if f": {r.reason}" in message] == [layout], "one mistake, one message"
    assert next(iter(values)) in message


def test_every_refusal_has_a_configuration_that_meets_it():
    assert {r.layout for r in MEMORY} == MET.keys()


@pytest.mark.parametrize("key", ["activation_checkpoint.offload", SHARDS, STATES])
def test_without_a_gpu_there_is_nothing_to_move(key):
    config = load([f"--{key}"]).config
    check_layout_on(config, "cuda", "2.11.0")
    with pytest.raises(ConfigError, match=f"{key} = true, and this machine has no GPU"):
        check_layout_on(config, "cpu", "2.13.0")


def test_shards_need_ranks_to_share_them():
    config = load([f"--{SHARDS}"]).config
    check_world(config, 2)
    with pytest.raises(ConfigError, match="with WORLD_SIZE 1 nothing is sharded"):
        check_world(config, 1)


def test_torchtitan_keys_load(tmp_path):
    text = '[training]\nenable_cpu_offload = true\n[activation_checkpoint]\nmode = "memory_budget"\nmemory_budget = 0.3'
    (tmp_path / "a.toml").write_text(text)
    config = load_file(tmp_path / "a.toml", COMPILED).config
    assert (config.training.enable_cpu_offload, config.activation_checkpoint.memory_budget) == (True, 0.3)
