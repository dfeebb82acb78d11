"""Losses over a vocabulary that ranks share against torch's over the whole one."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from config.loss import loss_peak_bytes
from model.loss import IGNORE, HeadLoss
from model.loss_chunked import RowChunked, VocabularyChunked
from parallelisms.vocabulary_loss import GatheredVocabulary, SharedVocabulary
from tests import ranks
from tests.fingerprint import Traffic
from tests.model.live_bytes import LiveBytes


def both(dtype: torch.dtype, scale: float) -> tuple:
    generator = torch.Generator().manual_seed(3)
    whole = (scale * torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(0, 12, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = IGNORE
    width, rank = 12 // dist.get_world_size(), dist.get_rank()
    mine = whole.detach()[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    shared = HeadLoss()
    shared.vocabulary = SharedVocabulary(init_device_mesh("cpu", (dist.get_world_size(),)))
    with Traffic({dist.group.WORLD.group_name: "tp"}) as traffic:
        loss = shared.of_logits(mine, labels)
        (3.0 * loss).backward()
    reference = HeadLoss().of_logits(whole, labels)
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


def every_loss() -> list[tuple[str, list[float]]]:
    """Name -> relative errors of loss and both gradients, each rank with half of the matrix, soft cap and z-loss on."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    matrix = torch.randn(14, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 14, (2, 6), generator=generator)
    labels[0] = IGNORE
    mesh = init_device_mesh("cpu", (2,))
    rows = slice(7 * mesh.get_local_rank(), 7 * mesh.get_local_rank() + 7)
    x, w = hidden.clone().requires_grad_(), matrix.clone().requires_grad_()
    reference = HeadLoss(3.0, 0.1)(x, w, labels)
    reference.backward()
    options, found = {"soft_cap": 3.0, "z_loss_coeff": 0.1}, []
    for name, loss in {
        "torch": HeadLoss(**options),
        "rows": RowChunked(5, **options),
        "columns": VocabularyChunked(3, **options),
        "gathered": HeadLoss(**options),
    }.items():
        loss.vocabulary = GatheredVocabulary(mesh) if name == "gathered" else SharedVocabulary(mesh)
        h, mine = hidden.clone().requires_grad_(), matrix[rows].clone().requires_grad_()
        value = loss(h, mine, labels)
        value.backward()
        dist.all_reduce(h.grad)  # each rank's is that of its columns
        pairs = ((value, reference), (h.grad, x.grad), (mine.grad, w.grad[rows]))
        found.append((name, [float((a - b).norm() / b.norm()) for a, b in pairs]))
    return found


def test_every_loss_over_a_shared_vocabulary_equals_torchs():
    for found in ranks.run(2, every_loss):
        for name, errors in found:
            assert max(errors) < 1e-14, name


SIZES = {"tokens": 256, "vocab": 1500, "dim": 32}
"""Columns of one rank."""


def peaks() -> list[int]:
    """Bytes, in float32 and bfloat16, with a share of the columns here."""
    vocabulary, found = SharedVocabulary(init_device_mesh("cpu", (dist.get_world_size(),))), []
    for dtype in (torch.float32, torch.bfloat16):
        hidden = torch.randn(1, SIZES["tokens"], SIZES["dim"], dtype=dtype, requires_grad=True)
        weight = torch.randn(SIZES["vocab"], SIZES["dim"], dtype=dtype, requires_grad=True)
        labels = torch.randint(0, 2 * SIZES["vocab"], hidden.shape[:2])
        loss = HeadLoss()
        loss.vocabulary = vocabulary
        with LiveBytes().keep(hidden, weight, labels) as memory:
            loss(hidden, weight, labels).backward()
        found.append(memory.peak)
    return found


def test_the_peak_is_that_of_its_formula():
    for found in ranks.run(2, peaks):
        for peak, size in zip(found, (4, 2), strict=True):
            formula = loss_peak_bytes("torch", **SIZES, compute_bytes=size, weight_bytes=size, shared=True)
            assert peak == pytest.approx(formula, rel=0.03)
            assert formula < loss_peak_bytes("torch", **SIZES, compute_bytes=size, weight_bytes=size)
