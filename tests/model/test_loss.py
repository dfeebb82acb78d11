"""Losses against torch's cross entropy of all logits, on fresh numbers; what of them is in memory."""

import math

import pytest
import torch
import torch.nn.functional as F

from config.loss import loss_peak_bytes
from config.schema import Config
from model.head import Head
from model.loss import IGNORE, HeadLoss, cross_entropy_sum
from model.loss_choice import loss_of
from model.loss_chunked import RowChunked, VocabularyChunked
from tests.model.live_bytes import LiveBytes

TOKENS, VOCAB, DIM = 42, 37, 16
KINDS = {
    "torch": HeadLoss,
    "rows": lambda **options: RowChunked(10, **options),
    "a row": lambda **options: RowChunked(1, **options),
    "all rows": lambda **options: RowChunked(1000, **options),
    "columns": lambda **options: VocabularyChunked(8, **options),
    "a column": lambda **options: VocabularyChunked(1, **options),
    "all columns": lambda **options: VocabularyChunked(1000, **options),
}
OPTIONS = {"plain": {}, "soft cap": {"soft_cap": 3.0}, "z-loss": {"z_loss_coeff": 0.1},
           "both": {"soft_cap": 3.0, "z_loss_coeff": 0.1}}  # fmt: skip


def test_sum_over_valid_labels_in_nats():
    logits = torch.zeros(2, 3, 10)
    labels = torch.tensor([[1, IGNORE, 2], [IGNORE, IGNORE, 9]])
    torch.testing.assert_close(cross_entropy_sum(logits, labels), torch.tensor(3 * math.log(10)))


def test_bfloat16_logits_are_summed_in_float32():
    logits = torch.randn(4, 64, 50, dtype=torch.bfloat16)
    labels = torch.randint(0, 50, (4, 64))
    loss = cross_entropy_sum(logits, labels)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def inputs(dtype=torch.float64, ignored="some"):
    torch.seed()
    hidden = torch.randn(2, TOKENS // 2, DIM, dtype=dtype)
    weight = torch.randn(VOCAB, DIM, dtype=dtype)
    labels = torch.randint(0, VOCAB, (2, TOKENS // 2))
    if ignored == "some":
        labels[0, 3:17] = IGNORE  # a whole chunk of ten rows among them
        labels[1, -1] = IGNORE
    if ignored == "all":
        labels[:] = IGNORE
    return hidden, weight, labels


def by_hand(hidden, weight, labels, soft_cap=0.0, z_loss_coeff=0.0):
    """(reported loss, what the gradient is of), written out."""
    logits = hidden @ weight.T
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    valid = labels != IGNORE
    log_sum = logits.exp().sum(-1).log()
    each = log_sum - logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return each[valid].sum(), (each + z_loss_coeff * log_sum**2)[valid].sum()


def evaluated(loss, hidden, weight, labels, scale=0.3):
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value = loss(h, w, labels)
    (scale * value).backward()
    return value.detach(), h.grad / scale, w.grad / scale


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_are_those_written_out(kind, options, ignored):
    hidden, weight, labels = inputs(ignored=ignored)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value, trained = by_hand(h, w, labels, **OPTIONS[options])
    trained.backward()
    found = evaluated(KINDS[kind](**OPTIONS[options]), hidden, weight, labels)
    for ours, theirs in zip(found, (value, h.grad, w.grad), strict=True):
        assert float((ours - theirs).norm()) <= 1e-13 * float(theirs.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_z_loss_and_soft_cap_change_the_gradient(kind):
    """The test above would pass if both sides ignored them."""
    hidden, weight, labels = inputs()
    plain = evaluated(KINDS[kind](), hidden, weight, labels)
    capped = evaluated(KINDS[kind](soft_cap=3.0), hidden, weight, labels)
    penalised = evaluated(KINDS[kind](z_loss_coeff=0.1), hidden, weight, labels)
    assert abs(float(capped[0] / plain[0]) - 1) > 0.01
    torch.testing.assert_close(penalised[0], plain[0])
    assert float((penalised[1] - plain[1]).norm() / plain[1].norm()) > 0.01


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_bfloat16_rounds_logits_and_gradients_once(kind):
    hidden, weight, labels = inputs(torch.bfloat16)
    torchs = evaluated(HeadLoss(), hidden, weight, labels)
    ours = evaluated(KINDS[kind](), hidden, weight, labels)
    exact = evaluated(HeadLoss(), hidden.double(), weight.double(), labels)
    assert ours[0].dtype == torch.float32 and ours[1].dtype == ours[2].dtype == torch.bfloat16
    torch.testing.assert_close(ours[0], torchs[0], rtol=1e-6, atol=0)
    for mine, theirs, true in zip(ours[1:], torchs[1:], exact[1:], strict=True):
        error, of_torch = ((x.double() - true).norm() / true.norm() for x in (mine, theirs))
        assert error <= 1.5 * of_torch + 1e-3 and error < 0.02


def test_the_matrixs_gradient_is_summed_over_chunks_in_float32():
    """4096 chunks of a row each: in bfloat16 the sum would stand still when it is 256 times a summand."""
    hidden, weight = torch.ones(1, 4096, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    labels = torch.zeros(1, 4096, dtype=torch.int64)
    _, _, grad = evaluated(RowChunked(1), hidden, weight, labels, scale=1.0)
    assert grad.flatten().tolist() == [-2048.0, 2048.0]


def test_the_hidden_states_gradient_is_summed_over_chunks_in_float32():
    """4096 chunks of a column each add 2^-12 up to 1, before the label's column takes 1 away."""
    hidden, weight = torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.ones(4096, 1, dtype=torch.bfloat16)
    _, grad, _ = evaluated(VocabularyChunked(1), hidden, weight, torch.full((1, 1), 4095), scale=1.0)
    assert abs(float(grad)) < 1e-3


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_under_autocast_the_masters_gradient_is_not_rounded_to_bfloat16(kind):
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, _, grad = evaluated(KINDS[kind](), hidden, weight, labels, scale=1.0)
    assert (grad != grad.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_the_product_is_in_bfloat16_and_the_masters_gradient_in_float32(kind):
    hidden, weight, labels = inputs(torch.float32)
    rounded = evaluated(HeadLoss(), hidden.bfloat16(), weight.bfloat16(), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, by_hidden, by_weight = evaluated(KINDS[kind](), hidden, weight, labels)
    assert by_hidden.dtype == by_weight.dtype == torch.float32
    torch.testing.assert_close(value, rounded[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(by_weight, rounded[2].float(), rtol=0.03, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_may_come_twice(kind):
    """Schedules that take gradients of inputs and of weights apart do so."""
    hidden, weight, labels = inputs()
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    loss = KINDS[kind]()(h, w, labels)
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    for a, b in zip(first, (*torch.autograd.grad(loss, h, retain_graph=True), *torch.autograd.grad(loss, w))):  # noqa: B905
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_nothing_is_kept(kind):
    hidden, weight, labels = inputs(torch.float32)
    expected = evaluated(KINDS[kind](), hidden, weight, labels)[0]
    weight.requires_grad_()
    with torch.no_grad(), LiveBytes().keep(hidden, weight, labels) as memory:
        value = KINDS[kind](z_loss_coeff=0.1)(hidden, weight, labels)
        assert memory.now < 100 * TOKENS
    torch.testing.assert_close(value, expected)


# At least as large as their formula takes for granted: scalars and numbers a token are left out of it.
SIZES = {"tokens": 512, "vocab": 3000, "dim": 64}
PEAKS = {"torch": {}, "row_chunked": {"chunk": 96}, "vocab_chunked": {"chunk": 500}}


@pytest.mark.parametrize("name", PEAKS)
def test_the_peak_is_that_of_its_formula(name):
    config = Config()
    config.loss.implementation = name
    config.loss.rows_per_chunk = config.loss.columns_per_chunk = PEAKS[name].get("chunk", 1)
    hidden = torch.randn(1, SIZES["tokens"], SIZES["dim"], requires_grad=True)
    weight = torch.randn(SIZES["vocab"], SIZES["dim"], requires_grad=True)
    labels = torch.randint(0, SIZES["vocab"], hidden.shape[:2])
    with LiveBytes().keep(hidden, weight, labels) as memory:
        loss_of(config)(hidden, weight, labels).backward()
    formula = loss_peak_bytes(name, **SIZES, **PEAKS[name], compute_bytes=4, weight_bytes=4)
    assert memory.peak == pytest.approx(formula, rel=0.03)
    assert memory.peak < 0.5 * loss_peak_bytes("torch", **SIZES) or name == "torch"


def test_a_head_gives_capped_logits_to_those_who_sample():
    head = Head(DIM, VOCAB, RowChunked(4, soft_cap=2.0))
    x = 10 * torch.randn(1, 3, DIM)
    torch.testing.assert_close(head(x), 2.0 * torch.tanh(x @ head.weight.T / 2.0))
    assert Head(DIM, VOCAB)(x).abs().max() > 2.0


@pytest.mark.parametrize("kind", ["torch", "rows", "columns"])
@pytest.mark.parametrize("options", ["plain", "both"])
def test_compiled(kind, options):
    hidden, weight, labels = inputs()
    loss = KINDS[kind](**OPTIONS[options])
    expected = evaluated(loss, hidden, weight, labels)
    loss.compile(lambda function: torch.compile(function, backend="aot_eager", fullgraph=True))
    for ours, theirs in zip(evaluated(loss, hidden, weight, labels), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
