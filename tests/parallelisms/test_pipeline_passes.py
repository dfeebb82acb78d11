"""What pipelines do beside gradients: passes and messages are counted, losses and metrics reach rank 0."""

import contextlib
import copy
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import train
from config.schema import Config
from config.world import mesh_degrees
from data.build import build_data
from parallelisms.mesh import Mesh
from parallelisms.pipeline_stage import BusyTime
from tests import ranks
from tests.fingerprint import Traffic, axes_of
from tests.parallelisms.test_parity_data import tiny
from tests.parallelisms.test_pipeline_parity import FULL, LAYERS, pp
from trainer.loss_watch import LossWatch, NonFiniteLoss
from trainer.validation import validate

VALIDATED = {"validation__enable": True, "validation__steps": 4, "validation__local_batch_size": 3}


def timed(seen: list[str]) -> contextlib.AbstractContextManager:
    """Within it, the first letter of each pass of a stage whose time is measured goes to ``seen``."""
    measured = BusyTime.measured

    def noted(self, name: str, detail: str):
        seen.append(name[0])
        return measured(self, name, detail)

    return mock.patch.object(BusyTime, "measured", noted)


def observe(config: Config, poison: bool = False, precision: str = "float32") -> dict:
    """Two steps and a validation on this rank, and what was seen of the second step."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config = copy.deepcopy(config)
    config.optimizer.name, config.training.mixed_precision_param = "SGD", precision
    mesh, device = Mesh(rank=rank, **mesh_degrees(config, world)), torch.device("cpu")
    if world > 1:
        mesh.connect("cpu")
    pipeline = build_data(config, dp_rank=mesh.dp_rank, dp_degree=mesh.dp_degree)
    model = train.build_model(config, mesh, device)
    watch = LossWatch(mesh.sum_over_data, skip=False)
    step = train.build_step(config, model, mesh, device, watch.accept)
    forwards: dict[str, int] = {}
    for name, module in model.named_modules():
        if name.endswith(("attention_norm", "tok_embeddings", "output")):
            module.register_forward_hook(lambda *_, name=name: forwards.update({name: forwards.get(name, 0) + 1}))
    step(pipeline.train.next_step())
    first = dict(forwards)
    if poison and mesh.pp_rank == 0:
        with torch.no_grad():
            next(p for p in model.parameters() if p.ndim == 1)[0] = math.nan
    passes: list[str] = []
    with Traffic(axes_of(mesh) if world > 1 else {}) as traffic, timed(passes):
        result = step(pipeline.train.next_step())
    try:
        loss, error = watch.latest()[0], ""
    except NonFiniteLoss as caught:
        loss, error = math.nan, str(caught)
    found = {
        "forwards": {name: n - first[name] for name, n in forwards.items()},
        "traffic": traffic.summary(),
        "loss": loss,
        "error": error,
        "norm": float(result.grad_norm),
        "report": step.passes.report(),
        "passes": "".join(passes),
    }
    if config.validation.enable:
        with Traffic(axes_of(mesh) if world > 1 else {}) as traffic:
            found["validation"] = validate(
                model, pipeline.validation(), forward=step.forward, sum_over_ranks=mesh.sum_over_data
            )
        found["validation traffic"] = traffic.summary()
        step(pipeline.train.next_step())  # training goes on after it
    pipeline.close()
    return found


def seen(world_size: int, config: Config, **keywords) -> list[dict]:
    return ranks.run(world_size, observe, config, *keywords.values())


@pytest.fixture(scope="module")
def one() -> dict:
    return seen(1, tiny(**LAYERS | VALIDATED))[0]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble", "naive"])
def test_loss_norm_and_validation_are_the_models_on_every_rank(one, schedule):
    for rank in seen(2, tiny(**LAYERS | VALIDATED | pp(schedule))):
        for name in ("loss", "norm"):
            assert rank[name] == pytest.approx(one[name], rel=1e-5)
        for tag, value in one["validation"].items():
            assert rank["validation"][tag] == pytest.approx(value, rel=1e-6), tag


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "DualPipeV"])
def test_each_layer_sees_each_micro_batch_once(schedule):
    """No phantom forward for shapes, in the first step neither; the whole model is there, once."""
    everywhere = [rank["forwards"] for rank in seen(2, tiny(**LAYERS | pp(schedule)))]
    assert sum(map(len, everywhere)) == 4 + 2
    assert {n for rank in everywhere for n in rank.values()} == {8}


def test_full_checkpointing_adds_one_forward_a_layer():
    for rank in seen(2, tiny(**LAYERS | pp("1F1B") | FULL)):
        for name, n in rank["forwards"].items():
            assert n == (16 if "attention_norm" in name else 8), name


# Messages and rows in each, for 8 micro-batches of 1 x 32 tokens x 32 float32 each; passes of both ranks, forward and
# backward, or how many. A V passes its middle on without a message, and its backward pass is two.
MESSAGES = {
    "naive": (4, 2, ["fb" * 4, "fb" * 4]),
    "GPipe": (8, 1, ["f" * 8 + "b" * 8] * 2),
    "1F1B": (8, 1, ["ff" + "bf" * 6 + "bb", "fb" * 8]),
    "Interleaved1F1B": (24, 1, [32, 32]),
    "ZBVZeroBubble": (16, 1, [48, 48]),
}


@pytest.mark.parametrize("schedule", MESSAGES)
def test_messages_bytes_and_passes_of_a_step(schedule):
    count, rows, passes = MESSAGES[schedule]
    first, last = seen(2, tiny(**LAYERS | VALIDATED | pp(schedule)))
    expected = {"calls": count, "bytes": count * rows * 32 * 32 * 4}
    for rank in (first, last):
        assert rank["traffic"]["pp"]["send"] == rank["traffic"]["pp"]["receive"] == expected
    for rank, expected in zip((first, last), passes, strict=True):
        assert expected in (rank["passes"], len(rank["passes"]))
    # Four batches of three sequences go forward alone: a message a boundary.
    sent = [rank["validation traffic"]["pp"].get("send", {"calls": 0})["calls"] for rank in (first, last)]
    assert sent == {"Interleaved1F1B": [8, 4], "ZBVZeroBubble": [4, 4]}.get(schedule, [4, 0])


@pytest.mark.parametrize("world_size", [2, 4], ids=["autocast", "fsdp2"])
def test_stages_exchange_the_dtype_that_is_between_blocks(world_size):
    """bfloat16, two bytes; under FSDP2 a rank has half the batch."""
    bfloat16 = {"poison": False, "precision": "bfloat16"}
    (one,) = seen(1, tiny(**LAYERS), **bfloat16)
    for rank in seen(world_size, tiny(**LAYERS | pp("1F1B")), **bfloat16):
        assert rank["loss"] == pytest.approx(one["loss"], rel=1e-3)
        count = 16 // world_size
        assert rank["traffic"]["pp"]["send"] == {"calls": count, "bytes": count * 32 * 32 * 2}


def test_what_waits_is_measured():
    for rank in seen(2, tiny(**LAYERS | pp("naive"))):
        assert 0 < rank["report"]["pipeline/bubble(%)"] < 100


def test_a_loss_that_is_not_finite_stops_every_rank():
    """The weight is spoilt on the first stage alone; the loss shows it on the last."""
    results = seen(2, tiny(**LAYERS | pp("1F1B")), poison=True)
    assert all("loss nan, gradient norm nan" in rank["error"] for rank in results)
