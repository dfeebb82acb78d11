import math

import torch

from model.loss import IGNORE, cross_entropy_sum


def test_sum_over_valid_labels_in_nats():
    logits = torch.zeros(2, 3, 10)
    labels = torch.tensor([[1, IGNORE, 2], [IGNORE, IGNORE, 9]])
    torch.testing.assert_close(cross_entropy_sum(logits, labels), torch.tensor(3 * math.log(10)))


def test_bfloat16_logits_are_summed_in_float32():
    logits = torch.randn(4, 64, 50, dtype=torch.bfloat16)
    labels = torch.randint(0, 50, (4, 64))
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def test_nothing_valid_gives_zero_loss_and_zero_gradient():
    logits = torch.randn(1, 4, 8, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((1, 4), IGNORE))
    loss.backward()
    assert float(loss) == 0.0
    assert float(logits.grad.abs().max()) == 0.0
