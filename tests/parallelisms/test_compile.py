import pytest
import torch

from model.loss import cross_entropy_sum
from parallelisms.compile import compile_loss


@pytest.fixture
def donating():
    """torch as it is before anything is compiled."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=True):
        yield


@pytest.mark.parametrize("before", [False, True], ids=["alone", "after another layout's"])
def test_a_compiled_loss_can_keep_its_graph(before, donating):
    """As zero-bubble schedules ask for; torch (2.13) gives buffers of the graph away otherwise, and stops."""
    logits, labels = torch.randn(2, 8, 16, requires_grad=True), torch.randint(0, 16, (2, 8))
    labels[0, :3] = -100
    (expected,) = torch.autograd.grad(cross_entropy_sum(logits, labels), logits)
    if before:
        compile_loss(cross_entropy_sum, backend="aot_eager")(logits, labels).backward()
    compiled = compile_loss(cross_entropy_sum, backend="aot_eager", backward_twice=True)
    compiled(logits, labels).backward()  # one that keeps none, as a schedule's last
    loss = compiled(logits, labels)
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_it_would_stop_without(donating):
    """What the option is for. When this fails, torch needs it no more."""
    logits, labels = torch.randn(2, 8, 16, requires_grad=True), torch.randint(0, 16, (2, 8))
    loss = compile_loss(cross_entropy_sum, backend="aot_eager")
    loss(logits, labels).backward()
    kept = loss(logits, labels)
    with pytest.raises(RuntimeError, match="donated"):
        torch.autograd.grad(kept, logits, retain_graph=True)
