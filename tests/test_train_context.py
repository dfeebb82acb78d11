"""train.py with shared sequences: what a run writes is what one process writes, and pathological cases end."""

import json

import pytest

from tests import parity
from tests.parallelisms.test_parity_context import CP2, CP4, METHOD
from tests.parallelisms.test_parity_data import tiny
from tests.test_train import launch, lines

SHARED = ["--parallelism.context_parallel_degree", "2"]
OPTIONS = ["--training.steps", "3", "--metrics.log_freq", "1", "--data.document_mask", "--data.mask_boundary_labels"]


def test_a_run_over_two_ranks_writes_what_one_process_writes(tmp_path):
    """Means over unequal numbers of valid tokens, the largest loss, held-out losses and bits a byte."""
    for name, ranks, more in (("one", 1, []), ("two", 2, SHARED)):
        done = launch(tmp_path / name, *OPTIONS, *more, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert len(one) == len(two)
    tags = ["loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "tokens"]
    tags += ["validation_metrics/loss", "validation_metrics/bits_per_byte", "validation_metrics/perplexity"]
    seen = set()
    for before, after in zip(one, two, strict=True):
        for tag in tags:
            assert (tag in before) == (tag in after)
            if tag in before:
                seen.add(tag)
                assert after[tag] == pytest.approx(before[tag], rel=1e-4), (tag, before["step"])
    assert seen == set(tags)
    record = json.loads((tmp_path / "two" / "run.json").read_text())
    assert record["mesh"]["cp"] == 2 and record["derived"]["data_parallel_degree"] == 1


def test_a_layout_that_cannot_be_is_one_message(tmp_path):
    done = launch(tmp_path / "run", *OPTIONS, *SHARED, "--training.seq_len", "66")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "training.seq_len = 66" in done.stderr and "4 pieces" in done.stderr
    assert not (tmp_path / "run").exists()


PATHOLOGICAL = {
    "pieces of one token": (4, CP4 | METHOD["ring"], {"training__seq_len": 8}),
    "pieces of one token, gathered": (4, CP4 | METHOD["allgather"], {"training__seq_len": 8}),
    "a rank without a label": (
        4,
        CP4,
        {"training__seq_len": 32, "data__tokenizer": "bytes"} | {"data__document_mask": True},
    ),
    "one head a rank, keys copied": (4, CP4 | METHOD["ulysses"], {"model__n_heads": 4, "model__n_kv_heads": 1}),
    "one sequence a step": (2, CP2, {"training__global_batch_size": 1, "training__local_batch_size": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PATHOLOGICAL)
def test_edges_end_and_are_right(case):
    """``ranks.run`` ends a case that hangs."""
    world_size, layout, model = PATHOLOGICAL[case]
    parity.check(tiny(**model), tiny(**model | layout), world_size=world_size)
