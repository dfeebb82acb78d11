"""Rows of the parity harness for data parallelism."""

import atexit
import copy
import functools
import shutil
import tempfile
from pathlib import Path

import pytest

from config.schema import Config
from data.build import build_data
from tests import parity
from tests.data.generated import generated_texts, write_jsonl


@functools.cache
def short_documents() -> Path:
    """A folder with documents of about a sequence each, so that masks and boundaries have something to do."""
    folder = Path(tempfile.mkdtemp(prefix="parity-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_jsonl(folder / "corpus" / "rows.jsonl", generated_texts(400))
    return folder


def tiny(**changes) -> Config:
    """A two-layer model on ``short_documents``; ``changes`` are ``section__key = value``."""
    config = Config()
    values = {
        "model__n_layers": 2, "model__dim": 32, "model__hidden_dim": 64, "model__vocab_size": 512,
        "data__corpus": "text", "data__path": str(short_documents() / "corpus"),
        "data__cache_dir": str(short_documents() / "cache"),
        "data__tokenizer": "bpe", "data__tokenizer_vocab_size": 512,
        "training__seq_len": 32, "training__local_batch_size": 2, "training__global_batch_size": 8,
        "optimizer__lr": 0.1,
    }  # fmt: skip
    for key, value in {**values, **changes}.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


DDP2 = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
FSDP2 = {"parallelism__data_parallel_shard_degree": 2}
HSDP = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 2}
DIRECT = {"parallelism__fsdp_collectives": "direct"}
ROWS = {
    "ddp2": (2, DDP2),
    "fsdp2": (2, FSDP2),
    "fsdp2 without resharding": (2, FSDP2 | {"parallelism__fsdp_reshard_after_forward": "never"}),
    "fsdp4": (4, {}),
    "hsdp 2x2": (4, HSDP),
    "one process, full checkpointing": (1, {"activation_checkpoint__mode": "full"}),
    "fsdp2, checkpointing by operator": (
        2,
        FSDP2 | {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"},
    ),
    "ddp2, every 2nd block checkpointed": (2, DDP2 | {"activation_checkpoint__mode": "selective"}),
    "fsdp2, one micro-batch": (2, FSDP2 | {"training__local_batch_size": 4}),
    "fsdp2, gathered once a step": (
        2,
        FSDP2
        | {"parallelism__fsdp_reshard_after_forward": "never", "parallelism__fsdp_reshard_after_backward": "never"},
    ),
    "fsdp2, freed after forward alone": (2, FSDP2 | {"parallelism__fsdp_reshard_after_backward": "never"}),
    "fsdp2, freed always": (2, FSDP2 | {"parallelism__fsdp_reshard_after_backward": "always"}),
    "fsdp2, reduced once a step": (2, FSDP2 | {"parallelism__fsdp_reduce_gradients": "last"}),
    "fsdp2, direct": (2, FSDP2 | DIRECT),
    "fsdp4, direct, two blocks ahead": (4, DIRECT | {"parallelism__fsdp_prefetch_blocks": 2}),
    "hsdp 2x2, direct": (4, HSDP | DIRECT),
    "one process, one micro-batch": (1, {"training__local_batch_size": 8}),
}
SLOW = ("fsdp2, freed always", "fsdp2, freed after forward alone", "fsdp2, gathered once a step", "hsdp 2x2, direct")
# Boundary labels do not count, so ranks and micro-batches have unequal numbers of valid tokens.
MODELS = {
    "plain": {},
    "tied, document masks": {
        "model__enable_weight_tying": True, "data__document_mask": True, "data__mask_boundary_labels": True,
        "model__qk_norm": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("row", [pytest.param(r, marks=[pytest.mark.slow] * (r in SLOW)) for r in ROWS])
@pytest.mark.parametrize("model", MODELS)
def test_a_mesh_trains_as_one_process_does(row, model):
    world_size, changes = ROWS[row]
    parity.check(tiny(**MODELS[model]), tiny(**MODELS[model] | changes), world_size=world_size)


@pytest.mark.parametrize("row", ["fsdp2", "fsdp4", "fsdp4, direct, two blocks ahead"])
def test_shards_of_unequal_size(row):
    """A vocabulary that the ranks cannot share equally; the last of four has less than the others."""
    world_size, changes = ROWS[row]
    parity.check(tiny(model__vocab_size=515), tiny(model__vocab_size=515, **changes), world_size=world_size)


def test_masked_rows_have_unequal_numbers_of_valid_tokens():
    """Otherwise they could not tell a sum over tokens from a mean of means."""
    config = tiny(**MODELS["tied, document masks"])
    pipelines = [build_data(config, dp_rank=rank, dp_degree=2) for rank in range(2)]
    for _ in range(2):
        steps = [pipeline.train.next_step() for pipeline in pipelines]
        valid = [[int((m.labels != -100).sum()) for m in step.micro_batches] for step in steps]
        assert sum(valid[0]) != sum(valid[1]) and len(set(valid[0] + valid[1])) > 2
    for pipeline in pipelines:
        pipeline.close()


def test_the_harness_explains_different_data():
    a, b = tiny(), tiny(debug__data_seed=1)
    with pytest.raises(AssertionError, match="data: .* samples that differ"):
        parity.check(a, b, world_size=1, steps=1)


def test_the_harness_explains_different_initial_weights():
    with pytest.raises(AssertionError, match="initial weights: tok_embeddings.weight is not bit-identical"):
        parity.check(tiny(), tiny(debug__init_seed=1), world_size=1, steps=1)


def test_the_harness_tells_a_wrong_gradient_from_a_rounded_one():
    reference = parity.trace(tiny(), 1, 1)
    wrong = copy.deepcopy(reference)
    wrong.gradients[0]["output.weight"] *= 2.0
    report = parity.compare(reference, wrong)
    assert report.failures == ["step 1: gradient of output.weight off by 1.0e+00 (norm ratio 2.000000)"]
    silent = copy.deepcopy(reference)
    reference.gradients[0]["norm.weight"].zero_()
    assert "must be exactly zero" in parity.compare(reference, silent).failures[0]


def test_training_changes_every_weight():
    result = parity.trace(tiny(), 1, 2)
    assert result.initial.keys() == result.weights[-1].keys()
    for name, before in result.initial.items():
        assert not before.equal(result.weights[-1][name]), name
    assert result.losses[0] != result.losses[1]


def test_tied_weights_stay_one_parameter():
    result = parity.trace(tiny(model__enable_weight_tying=True), 1, 1)
    assert "output.weight" not in result.initial
