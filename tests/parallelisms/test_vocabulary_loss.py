"""Cross entropy over a split vocabulary against torch's over the whole one."""

import pytest
import torch
import torch.distributed as dist

from model.loss import IGNORE as THEIRS
from model.loss import cross_entropy_sum
from parallelisms.vocabulary_loss import IGNORE, vocabulary_parallel_cross_entropy_sum
from tests import ranks
from tests.fingerprint import Traffic


def both(dtype: torch.dtype, scale: float) -> tuple:
    generator = torch.Generator().manual_seed(3)
    whole = (scale * torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(0, 12, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = IGNORE
    width, rank = 12 // dist.get_world_size(), dist.get_rank()
    mine = whole.detach()[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    with Traffic({dist.group.WORLD.group_name: "tp"}) as traffic:
        loss = vocabulary_parallel_cross_entropy_sum(mine, labels, dist.group.WORLD)
        (3.0 * loss).backward()
    reference = cross_entropy_sum(whole, labels)
    (3.0 * reference).backward()
    expected = whole.grad[..., rank * width : (rank + 1) * width]
    return loss.detach(), reference.detach(), mine.grad, expected, traffic.summary()


# 3e4: exponentials overflow unless the largest logit of the *whole* row is subtracted.
@pytest.mark.parametrize(
    "dtype, scale, tolerance",
    [(torch.float64, 1.0, 1e-14), (torch.float32, 1.0, 1e-6), (torch.float32, 3e4, 1e-6), (torch.bfloat16, 1.0, 1e-2)],
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_the_whole_vocabulary(world_size, dtype, scale, tolerance):
    for loss, reference, grad, expected, traffic in ranks.run(world_size, both, dtype, scale):
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert grad.dtype == dtype
        torch.testing.assert_close(loss, reference, rtol=tolerance, atol=0)
        torch.testing.assert_close(grad, expected, rtol=tolerance, atol=tolerance)
        size = loss.element_size() * 10
        assert traffic == {"tp": {"all_reduce": {"calls": 2, "bytes": 3 * size}}}, "three numbers a token, never logits"


def test_the_same_label_is_ignored_as_in_the_model():
    assert IGNORE == THEIRS
