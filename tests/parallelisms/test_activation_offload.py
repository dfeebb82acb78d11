"""What blocks save goes to CPU memory and comes back: the same gradients, each storage once, weights never."""

import pytest
import torch

from model.attention import attention_backend
from model.decoder import Decoder
from model.initial_weights import draw, initial_value
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.activation_offload import Activations, apply_activation_offload
from parallelisms.compile import apply_compile
from parallelisms.names import named_parameters
from tests.parallelisms.test_activation_checkpoint import LAYERS, SHAPE

TOKENS = torch.arange(32).view(2, 16) * 3 % 97
HIDDEN_BYTES = TOKENS.numel() * SHAPE.dim * 4


def model(mode: str = "none", *, offload: bool, compiled: bool = False) -> Decoder:
    found = Decoder(SHAPE, attention_backend("sdpa"), 16)
    with torch.no_grad():
        for name, p in found.named_parameters():
            p.copy_(draw(name, p.shape, initial_value(name, SHAPE), 0, p.device))
    if mode != "none":
        apply_activation_checkpoint(found, mode=mode, selective_ac_option="2")
    if offload:
        apply_activation_offload(found, minimum_bytes=0)
    if compiled:
        apply_compile(found, backend="aot_eager", inside_wrapper=offload)
    return found


def gradients(found: Decoder, tokens: torch.Tensor = TOKENS) -> dict[str, torch.Tensor]:
    found(tokens).logsumexp(-1).sum().backward()
    return {name: p.grad.clone() for name, p in named_parameters(found) if p.grad is not None}


def sent_bytes(found: Decoder) -> int:
    return next(iter(found.layers.values())).activations.sent_bytes


@pytest.mark.parametrize("mode", ["none", "full"])
def test_gradients_are_the_same_to_the_bit(mode):
    plain, moved = model(mode, offload=False), model(mode, offload=True)
    for _ in range(2):  # and again after everything has come back
        expected, found = gradients(plain), gradients(moved)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[n], found[n]) for n in expected)


def test_of_a_recomputed_block_its_input_alone_moves():
    moved = model("full", offload=True)
    gradients(moved)
    assert sent_bytes(moved) == LAYERS * HIDDEN_BYTES


def test_a_storage_moves_once_and_weights_stay():
    moved, weights = model(offload=True), set()
    saved: list[int] = []
    send = Activations._send

    def watched(self, frame, x):
        saved.append(x.untyped_storage().data_ptr())
        return send(self, frame, x)

    weights = {p.untyped_storage().data_ptr() for p in (*moved.parameters(), moved.rope)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Activations, "_send", watched)
        moved(TOKENS)
    assert saved and not weights & set(saved)
    assert len(saved) > len(set(saved)), "queries, keys and values are products of one input"
    seen = {id(s): s.host.numel() for s in _storages(moved)}
    assert sent_bytes(moved) == sum(seen.values()) and len(seen) < len(saved)


def _storages(moved: Decoder) -> list:
    activations = next(iter(moved.layers.values())).activations
    frame, found = activations._latest, []
    while frame is not None:
        found += frame.storages
        frame = frame.before
    return found


def test_the_device_holds_the_last_block_and_in_backward_two():
    moved = model(offload=True)
    loss = moved(TOKENS).logsumexp(-1).sum()
    held = [s.held is not None for s in _storages(moved)]
    last = len(moved.layers["0"].activations._latest.storages)
    assert all(held[:last]) and not any(held[last:])
    most, storages, fetch = [0], _storages(moved), Activations._fetch

    def watched(self, frame, wanted):
        fetch(self, frame, wanted)
        most[0] = max(most[0], sum(s.held is not None for s in storages))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Activations, "_fetch", watched)
        loss.backward()
    assert last < most[0] <= 2 * last
    assert not any(s.held is not None for s in storages), "nothing is left on the device"


def test_micro_batches_in_flight_and_a_graph_that_is_kept():
    """A pipeline has several forward passes before the first backward pass; a graph may also be walked twice."""
    other = TOKENS.flip(0) + 1
    plain, moved = model(offload=False), model(offload=True)
    for found in (plain, moved):
        first, second = (found(t % 97).logsumexp(-1).sum() for t in (TOKENS, other))
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
    for (name, a), (_, b) in zip(named_parameters(plain), named_parameters(moved), strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_a_compiled_block_saves_moves(mode):
    torch.compiler.reset()
    plain, moved = model(mode, offload=False, compiled=True), model(mode, offload=True, compiled=True)
    expected, found = gradients(plain), gradients(moved)
    assert all(torch.equal(expected[n], found[n]) for n in expected)
    assert sent_bytes(moved) >= LAYERS * HIDDEN_BYTES


def test_under_autocast_cast_weights_stay():
    moved = model(offload=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved(TOKENS[:, :8])  # as many tokens as no matrix has rows
    sizes = {s.host.numel() for s in _storages(moved)}
    assert 2 * SHAPE.dim * SHAPE.hidden_dim not in sizes, "a bfloat16 matrix of the feed-forward layer"


def test_a_pass_without_gradients_moves_nothing():
    moved = model(offload=True)
    with torch.no_grad():
        moved(TOKENS)
    assert sent_bytes(moved) == 0


def test_small_tensors_stay():
    moved = Decoder(SHAPE, attention_backend("sdpa"), 16)
    apply_activation_offload(moved)
    moved(TOKENS)
    assert sent_bytes(moved) == 0, "none has a MiB"


def test_a_view_comes_back_as_the_part_it_was():
    x, activations = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), Activations(0)

    def gated(x: torch.Tensor) -> torch.Tensor:
        left, right = (2 * x).split(3 + 2, -1)[0][:, 1:].chunk(2, -1)
        return left.sin() * right.cos()

    with activations.of_block((), first=True):
        out = gated(x)
    (found,) = torch.autograd.grad(out.sum(), x)
    (expected,) = torch.autograd.grad(gated(x).sum(), x)
    assert torch.equal(found, expected)


def test_a_backward_pass_brings_back_nothing_of_another_forward_pass():
    moved = model(offload=True)
    first = moved(TOKENS).logsumexp(-1).sum()
    waiting = _storages(moved)
    moved(TOKENS.flip(0)).logsumexp(-1).sum().backward()
    assert waiting and not any(s.held is not None for s in waiting)
    first.backward()
