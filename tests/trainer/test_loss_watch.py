import io
import logging
import math
import os
from types import SimpleNamespace

import pytest
import torch

from parallelisms import process_group
from parallelisms.mesh import Mesh
from tests import ranks
from trainer.loss_watch import LossWatch, NonFiniteLoss
from trainer.train_step import StepResult


def batch(step: int, tokens: int = 10) -> SimpleNamespace:
    labels = torch.arange(tokens)[None]
    micro_batch = SimpleNamespace(labels=labels, document_names=[f"doc-{step}"])
    return SimpleNamespace(step=step, micro_batches=[micro_batch], global_valid_tokens=2 * tokens)


def result(loss_sum: float, norm: float = 1.0) -> StepResult:
    return StepResult(torch.tensor(loss_sum), torch.tensor(norm))


def two_ranks(x: torch.Tensor) -> torch.Tensor:
    return x + 30.0  # the other rank's loss sum


def test_the_loss_is_the_global_token_mean_of_the_latest_step():
    watch = LossWatch(two_ranks, skip=False)
    assert watch.accept(batch(1), result(50.0))
    assert watch.accept(batch(2), result(10.0))
    assert watch.latest() == ((10.0 + 30.0) / 20, 10.0 / 10)
    assert watch.step == 2


@pytest.mark.parametrize("bad", [result(math.nan), result(math.inf), result(1.0, math.nan)])
def test_a_bad_step_between_log_steps_is_named_with_its_documents(bad):
    watch = LossWatch(lambda x: x, skip=False)
    watch.accept(batch(1), result(1.0))
    watch.accept(batch(2), bad)
    watch.accept(batch(3), result(math.nan))
    with pytest.raises(NonFiniteLoss, match="step 2: .*doc-2.*nonfinite_loss"):
        watch.latest()


@pytest.mark.parametrize("bad", [result(math.nan), result(math.inf), result(1.0, math.inf)])
def test_skipping_vetoes_the_update_and_counts(bad):
    watch = LossWatch(lambda x: x, skip=True)
    assert watch.accept(batch(1), result(4.0))
    assert not watch.accept(batch(2), bad)
    assert watch.skipped_steps == 1
    assert watch.latest() == (4.0 / 20, 4.0 / 10)
    assert watch.counts() == {"loss_metrics/skipped_steps": 1}
    assert watch.latest() == (4.0 / 20, 4.0 / 10)  # nothing new: the loss of the last accepted step


def train_on_one_bad_rank(skip: bool) -> str:
    rank = int(os.environ["RANK"])
    mesh = Mesh(rank=rank, dp_replicate=2)
    mesh.connect("cpu")
    watch = LossWatch(mesh.sum_over_data, skip=skip, gather=process_group.gather)
    step = batch(3)
    step.micro_batches[0].document_names = [f"read by rank {rank}"]
    caught = io.StringIO()
    logging.getLogger("trainer.loss_watch").addHandler(logging.StreamHandler(caught))
    try:
        watch.accept(step, result(math.nan if rank == 1 else 2.0, math.nan))
        watch.latest()
    except NonFiniteLoss as error:
        return str(error)
    return caught.getvalue()


@pytest.mark.parametrize("skip", [False, True])
def test_the_documents_named_are_those_of_the_rank_to_blame(skip):
    for message in ranks.run(2, train_on_one_bad_rank, skip):
        assert "step 3: loss nan" in message and "documents: read by rank 1" in message
        assert "read by rank 0" not in message


def test_a_gradient_alone_names_all_documents():
    watch = LossWatch(lambda x: x, skip=False, gather=lambda names: [names, ["elsewhere"], names])
    watch.accept(batch(1), result(1.0, math.inf))
    with pytest.raises(NonFiniteLoss, match="documents: doc-1, elsewhere\\."):
        watch.latest()


def test_nothing_is_read_from_the_device_before_the_log_step():
    watch = LossWatch(lambda x: pytest.fail("reduced outside a log step"), skip=False)
    assert watch.accept(batch(1), StepResult(torch.empty((), device="meta"), torch.empty((), device="meta")))
