"""Modules with Liger's kernels under every layout, with plain operators in the kernels' place: a CPU has no Triton.

What is under test is where the kernels are called: with shards, with whole weights, and with gradients summed over the
ranks that hold different tokens.
"""

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from model import feed_forward, liger, rope
from tests import parity, ranks
from tests.parallelisms.test_parity_data import tiny
from tests.parallelisms.test_parity_tensor import EXPERTS, TP2, sparse

LIGER = {"liger__rms_norm": True, "liger__rope": True, "liger__swiglu": True}
NORMS = {"model__qk_norm": True, "data__document_mask": True, "data__mask_boundary_labels": True}
BY_OPERATOR = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
COMPILED = {"compile__enable": True, "compile__backend": "aot_eager"}
PP2 = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "1F1B"}
ROWS = {"tp2": (2, TP2), "fsdp2 x tp2, by operator": (4, TP2 | BY_OPERATOR)}
SLOW = {"fsdp2, compiled": (2, COMPILED), "tp2, compiled": (2, TP2 | COMPILED), "pp2": (2, PP2)}


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """On what a kernel takes: plain tensors, the same number of features."""
    assert type(x) is torch.Tensor and not hasattr(weight, "placements") and len(weight) == x.shape[-1]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def train_with_plain_kernels(config, steps: int) -> parity.Trace:
    with (
        mock.patch.object(liger, "rms_norm", plain_rms_norm),
        mock.patch.object(liger, "rotate", rope.rotate),
        mock.patch.object(liger, "gated", feed_forward.gated),
    ):
        return parity._train(config, steps)


def check(config, layout: dict, world_size: int) -> None:
    config.optimizer.name, config.optimizer.weight_decay, config.training.max_norm = "SGD", 0.0, 0.0
    config.training.mixed_precision_param = "float32"
    expected = parity.trace(config, 1, 2)
    candidate = copy.deepcopy(config)
    for key, value in {**layout, **LIGER}.items():
        section, name = key.split("__")
        setattr(getattr(candidate, section), name, value)
    found = ranks.run(world_size, train_with_plain_kernels, candidate, 2)[0]
    assert parity.compare(expected, found).failures == []


@pytest.mark.parametrize("row", ROWS)
def test_modules_with_kernels_train_as_plain_ones_do(row):
    world_size, layout = ROWS[row]
    check(tiny(**NORMS), layout, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW)
def test_every_other_layout(row):
    world_size, layout = SLOW[row]
    check(tiny(**NORMS), layout, world_size)


@pytest.mark.slow
def test_one_norm_for_all_heads_is_given_whole_rows():
    check(sparse(model__n_kv_heads=2, **EXPERTS["one query norm for all heads"]), TP2, 2)
