"""Each refused layout has a configuration that meets it, and no other refusal; docs list all of them."""

from pathlib import Path

import pytest

from config.errors import ConfigError
from config.layouts import check_layout_on
from config.load import load
from config.pipeline import reshard_after_forward
from config.refused_layouts import REFUSED
from config.refused_memory import MEMORY
from config.world import mesh_degrees
from tests.config.refusal import refusal

DOCS = Path(__file__).resolve().parents[2] / "docs" / "parallelisms.md"
TP, STAGE, FSDP1 = "parallelism.tensor_parallel_degree", "parallelism.zero_stage", {"parallelism.fsdp_version": 1}
CP, ULYSSES = "parallelism.context_parallel_degree", "parallelism.context_parallel_method"
EIGHT_HEADS = {"model.n_heads": 8, "model.n_kv_heads": 8}
EP = "parallelism.expert_parallel_degree"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
PIPELINED = {"parallelism.pipeline_parallel_degree": 2, "training.global_batch_size": 8, "training.local_batch_size": 2}
EXPERTS = {"model.name": "moe", "model.flavor": "debug_moe"}
MET = {
    "TP, n_heads not divisible": {TP: 8, "model.n_kv_heads": 1, "model.n_heads": 12, "model.dim": 192},
    "TP, n_kv_heads not divisible": {TP: 4, "model.n_heads": 4, "model.n_kv_heads": 2},
    "TP, feed-forward width not divisible": {TP: 2, "model.hidden_dim": 129},
    "TP, expert width not divisible": {TP: 2, **EXPERTS, "moe.hidden_dim": 97},
    "TP, vocabulary not divisible": {TP: 2, "model.vocab_size": 4097},
    "TP, sequence not divisible": {TP: 2, "training.seq_len": 257},
    "asynchronous TP without torch.compile (inductor)": {"parallelism.enable_async_tensor_parallel": "true", TP: 2},
    "TP with compiled blocks and checkpointing by operator": {
        TP: 2,
        "compile.enable": True,
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    },
    "ZeRO 0 or 1 with a shard degree": {STAGE: 1, "parallelism.data_parallel_shard_degree": 2},
    "ZeRO 2 or 3 without sharding": {STAGE: 2, "parallelism.data_parallel_shard_degree": 1},
    "ZeRO 2 or 3 with copies": {STAGE: 3, "parallelism.data_parallel_replicate_degree": 2},
    "ZeRO stage against resharding": {STAGE: 3, "parallelism.fsdp_reshard_after_forward": "never"},
    "ZeRO 1 with TP": {STAGE: 1, TP: 2},
    "ZeRO 1 with experts": {STAGE: 1, **EXPERTS},
    "FSDP1 with TP": {**FSDP1, TP: 2},
    "FSDP1 with copies, or without sharding": {**FSDP1, "parallelism.data_parallel_replicate_degree": 2},
    "FSDP1 with a ZeRO stage below 3": {**FSDP1, STAGE: 2},
    "FSDP1 with experts": {**FSDP1, **EXPERTS},
    "EP, num_experts not divisible": {"moe.num_experts": 9, EP: 2, **EXPERTS},
    "EP with whole copies (DDP)": {EP: 2, "parallelism.data_parallel_shard_degree": 1, **EXPERTS},
    "expert TP other than 1 or TP": {"parallelism.expert_tensor_parallel_degree": 2, EP: 2, **EXPERTS},
    "expert TP without EP": {"parallelism.expert_tensor_parallel_degree": 2, TP: 2, **EXPERTS},
    "overlap with shared experts without any": {
        "moe.num_shared_experts": 0,
        "moe.comm_overlap": "shared_expert",
        EP: 2,
        **EXPERTS,
    },
    "overlap with experts, a token once a rank": {
        "moe.comm_overlap": "experts", "moe.dispatcher": "all_to_all_dedup", EP: 2, **EXPERTS,
    },
    "overlap with experts, one expert a rank": {"moe.comm_overlap": "experts", "moe.num_experts": 4, EP: 4, **EXPERTS},
    "EP with zero bubble": {
        EP: 2,
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble",
        "training.global_batch_size": 8,
        "training.local_batch_size": 1,
        **EXPERTS,
    },
    "prefetch depth without FSDP2": {"parallelism.fsdp_prefetch_blocks": 2, STAGE: 0},
    "FSDP2's messages without FSDP2": {"parallelism.fsdp_collectives": "direct", STAGE: 0},
    "FSDP2 between the micro-batches of a pipeline": {"parallelism.fsdp_reduce_gradients": "last", **PIPELINED},
    "direct collectives with CPU offload": {
        "parallelism.fsdp_collectives": "direct",
        "training.enable_cpu_offload": True,
        "parallelism.data_parallel_shard_degree": 2,
    },
    "CP, sequence not divisible": {CP: 2, "training.seq_len": 254},
    "CP with TP, sequence not divisible": {CP: 2, TP: 4, "training.seq_len": 36, **EIGHT_HEADS},
    "Ulysses, n_heads not divisible": {
        CP: 4,
        ULYSSES: "ulysses",
        "model.n_heads": 6,
        "model.n_kv_heads": 6,
        "model.dim": 96,
    },
    "Ulysses, n_kv_heads do not share out": {
        CP: 4,
        ULYSSES: "ulysses",
        "model.n_heads": 12,
        "model.n_kv_heads": 6,
        "model.dim": 192,
    },
    "CP with ZeRO 0 or 1": {CP: 2, STAGE: 0},
    "CP with FSDP1": {CP: 2, **FSDP1},
    "CP that cuts what experts decide together": {CP: 2, **EXPERTS, "moe.capacity": "position"},
    "zero bubble with activation checkpointing": {
        SCHEDULE: "ZBVZeroBubble", **PIPELINED, "activation_checkpoint.mode": "full",
    },
    "zero bubble with compiled blocks": {SCHEDULE: "ZBVZeroBubble", **PIPELINED, "compile.enable": True},
    "zero bubble with resharding after forward": {
        SCHEDULE: "ZBVZeroBubble", **PIPELINED, "parallelism.fsdp_reshard_after_forward": "always",
    },
    "pipeline that cuts a balance group": {"training.local_batch_size": 2, **PIPELINED, **EXPERTS},
    "pipeline with exact global load": {
        **PIPELINED, **EXPERTS, "moe.balance": "global_aux_loss", "moe.f_source": "exact",
        "parallelism.pipeline_parallel_microbatch_size": 2,
    },
    "pipeline with ZeRO 1": {**PIPELINED, STAGE: 1},
    "pipeline with FSDP1": {**PIPELINED, **FSDP1},
}  # fmt: skip


def words(values: dict) -> list[str]:
    return [word for key, value in values.items() for word in (f"--{key}", str(value).replace("True", "true"))]


@pytest.mark.parametrize("layout", MET)
def test_a_refused_layout_is_refused_with_its_reason(tmp_path, layout):
    (expected,) = [r for r in REFUSED if r.layout == layout]
    message = refusal(tmp_path, load, words(MET[layout]))
    assert f": {expected.reason}" in message
    others = [r.layout for r in REFUSED if r.reason != expected.reason and f": {r.reason}" in message]
    assert others in ([], ["TP, n_kv_heads not divisible"]), "one mistake, one message"
    key, value = next(iter(MET[layout].items()))
    assert f"{key} = {value}" in message.replace('"', ""), "the message names the numbers"


def test_every_refusal_is_met_by_a_test_and_listed_in_the_docs():
    assert {r.layout for r in REFUSED if r not in MEMORY} == MET.keys()
    page = " ".join(DOCS.read_text(encoding="utf-8").split())
    unlisted = [r.layout for r in REFUSED if f"| {r.layout} | {r.reason} |" not in page]
    assert not unlisted, f"not in docs/parallelisms.md as | layout | reason |: {unlisted}"


@pytest.mark.parametrize(
    ("stage", "degrees", "reshard"),
    [
        (0, {"dp_replicate": 4, "dp_shard": 1}, "default"),
        (1, {"dp_replicate": 4, "dp_shard": 1}, "default"),
        (2, {"dp_replicate": 1, "dp_shard": 4}, "never"),
        (3, {"dp_replicate": 1, "dp_shard": 4}, "default"),
    ],
)
def test_a_stage_decides_degrees_and_resharding(stage, degrees, reshard):
    config = load(words({STAGE: stage})).config
    assert mesh_degrees(config, 4).items() >= degrees.items()
    assert reshard_after_forward(config) == reshard
    if stage != 1:
        config = load(words({STAGE: stage, TP: 2})).config
        assert mesh_degrees(config, 8).items() >= degrees.items()


def test_a_stage_that_copies_refuses_a_world_its_copies_do_not_fill(tmp_path):
    config = load(words({STAGE: 0, "parallelism.data_parallel_replicate_degree": 3})).config
    assert "WORLD_SIZE is 4" in refusal(tmp_path, mesh_degrees, config, 4)


def test_asynchronous_communication_needs_a_gpu():
    values = {TP: 2, "parallelism.enable_async_tensor_parallel": True, "compile.enable": True}
    config = load(words(values)).config
    check_layout_on(config, "cuda", "2.11.0")
    with pytest.raises(ConfigError, match="no GPU"):
        check_layout_on(config, "cpu", "2.13.0")


def test_compiled_float32_experts_need_a_newer_torch():
    options = ["--compile.enable", "--model.name", "moe", "--model.flavor", "debug_moe"]
    config = load([*options, "--training.mixed_precision_param", "float32"]).config
    with pytest.raises(ConfigError, match="silently zero before torch 2.13"):
        check_layout_on(config, "cuda", "2.11.0+cu130")
    check_layout_on(config, "cuda", "2.13.0+cpu")
    config.training.mixed_precision_param = "bfloat16"
    check_layout_on(config, "cuda", "2.11.0+cu130")


def test_keys_of_tensor_parallelism_without_it_are_noted():
    notes = load(words({"parallelism.disable_loss_parallel": True})).notes
    assert any("disable_loss_parallel = true has no effect" in note for note in notes)
