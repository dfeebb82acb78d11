"""The transformers peer is our model, our data and our hyper-parameters in other words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.compare import job_of, parser
from benchmarks.inputs import text_and_tokenizer, token_file
from benchmarks.side import Setting
from benchmarks.side_transformers import Transformers, hf_config, specification
from benchmarks.transformers_peer import draw
from benchmarks.workloads import WORKLOADS
from config.arithmetic import parameter_counts
from config.flavors import resolve_shape
from config.load import load_file
from data.build import build_data
from model.initial_weights import initial_value
from tests.benchmarks.sides import debug_job


@pytest.mark.parametrize("workload", ["dense_1b", "dense_8b", "moe_7b"])
def test_the_peers_model_has_our_parameters(workload: str) -> None:
    transformers = pytest.importorskip("transformers")
    job = job_of(WORKLOADS[workload], parser().parse_args([workload]), "cpu", Path("."))
    spec = specification(job, Setting(1), "tokens.npy")
    kind = {"llama": "Llama", "olmoe": "Olmoe"}[spec["family"]]
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**spec["config"]))
    there = sum(p.numel() for p in model.parameters())
    # OLMoE's query and key norms span all heads, ours one.
    extra = 2 * job.shape.n_layers * (job.shape.dim - job.shape.head_dim) if job.shape.moe else 0
    assert there == parameter_counts(job.shape).total + extra
    assert job.tokens_per_step == WORKLOADS[workload].sequences * job.config.training.seq_len


def test_weights_are_drawn_with_our_standard_deviations() -> None:
    shape = resolve_shape(load_file("train_configs/debug_moe.toml").config.model)
    ours = {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "lm_head.weight": "output.weight",
        **{f"model.layers.3.self_attn.{k}_proj.weight": f"layers.3.attention.w{k}.weight" for k in "qkvo"},
        "model.layers.2.mlp.gate_proj.weight": "layers.2.feed_forward.w1.weight",
        "model.layers.2.mlp.down_proj.weight": "layers.2.feed_forward.w2.weight",
        "model.layers.2.mlp.up_proj.weight": "layers.2.feed_forward.w3.weight",
        "model.layers.1.mlp.gate.weight": "layers.1.moe.router.gate.weight",
        "model.layers.1.mlp.experts.down_proj": "layers.1.moe.experts.w2",
    }
    torch.manual_seed(0)
    for theirs, name in ours.items():
        value = torch.empty(300, 300)
        draw(theirs, value, shape.dim)
        assert value.std().item() == pytest.approx(initial_value(name, shape).std, rel=0.03), theirs
    rule = initial_value("layers.1.moe.experts.w13", shape)
    experts = torch.empty(4, 200, 300)
    draw("model.layers.1.mlp.experts.gate_up_proj", experts, shape.dim)
    gate, up = experts.chunk(2, dim=1)
    assert (gate.std().item(), up.std().item()) == (
        pytest.approx(rule.std, rel=0.03),
        pytest.approx(rule.odd_std, rel=0.03),
    )
    for norm in (
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ):
        value = torch.zeros(8)
        draw(norm, value, shape.dim)
        assert value.eq(1).all(), norm


def test_the_token_file_holds_what_each_rank_of_ours_trains_on(tmp_path: Path) -> None:
    job = debug_job(tmp_path, "debug", "--ngpu", "2", "--timed_steps", "5")
    everything = np.load(token_file(job))
    assert everything.shape == (10, 2, 8, 64)
    batch, ranks = 2, 2
    for rank in range(ranks):
        config = load_file(
            job.config.job.config_file, {"training.local_batch_size": batch, "training.global_batch_size": 8}
        ).config
        pipeline = build_data(config, dp_rank=rank, dp_degree=ranks)
        for step in range(2):
            for a, micro_batch in enumerate(pipeline.train.next_step().micro_batches):
                first = (a * ranks + rank) * batch  # the rows benchmarks/transformers_peer.py takes
                assert (everything[step, 0, first : first + batch] == micro_batch.tokens.numpy()).all()
                assert (everything[step, 1, first : first + batch] == micro_batch.labels.numpy()).all()
        pipeline.close()


def test_rates_are_torchtitans_schedule_and_what_is_left_of_a_step_is_accumulation(tmp_path: Path) -> None:
    job = debug_job(tmp_path, "debug", "--timed_steps", "5")
    spec = specification(job, Setting(2, ("full", "compile")), "tokens.npy")
    assert (spec["batch"], spec["accumulation"], spec["checkpoint"], spec["compile"]) == (2, 2, True, True)
    assert spec["learning_rates"][:3] == [pytest.approx(job.config.optimizer.lr * f) for f in (0.5, 1.0, 1.0)]
    assert spec["learning_rates"][2:] == sorted(spec["learning_rates"][2:], reverse=True)
    assert specification(job, Setting(4, ("flash",)), "t")["attention"] == "flash_attention_2"


def test_scaled_rotary_frequencies_go_along() -> None:
    shape = resolve_shape(load_file("benchmarks/configs/dense_1b.toml").config.model)
    rope = hf_config(shape, 4096)["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 500_000.0)


def test_torchtitan_gets_our_text_and_our_tokenizer(tmp_path: Path) -> None:
    import json

    from data.tokenizers import load_file_tokenizer

    job = debug_job(tmp_path)
    assets = text_and_tokenizer(job) / "tests" / "assets"
    with open(assets / "c4_test" / "data.json", encoding="utf-8") as file:
        first = json.loads(next(file))["text"]
    tokenizer = load_file_tokenizer(str(assets / "tokenizer"))
    pipeline = build_data(job.config, dp_rank=0, dp_degree=1)
    assert list(tokenizer.encode(first[:500])) == list(pipeline.tokenizer.encode(first[:500]))
    pipeline.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload, words", [("debug", "2+full"), ("debug", "4+full+compile"), ("debug_moe", "2+full+compile")]
)
def test_every_word_trains_the_same_model(workload: str, words: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    job = debug_job(tmp_path, workload, "--timed_steps", "5")
    batch, *rest = words.split("+")
    plain = Transformers().run(job, Setting(4))["losses"]
    other = Transformers().run(job, Setting(int(batch), tuple(rest)))["losses"]
    assert list(other.values()) == pytest.approx(list(plain.values()), rel=1e-4)
