"""Logits and gradients of transformers' models with the same weights, in float32 on the CPU."""

import pytest
import torch
import torch.nn.functional as F

from interchange.families import FAMILIES
from interchange.load import load_hf_model
from interchange.pieces import pieces
from tests.interchange.peers import PEERS, saved_peer


def _theirs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients under the names of a folder; transformers keeps experts stacked, gate over up."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(parameter.grad):
                gate, up = both.chunk(2)
                found[name.replace("gate_up_proj", f"{e}.gate")], found[name.replace("gate_up_proj", f"{e}.up")] = (
                    gate,
                    up,
                )
        elif name.endswith("experts.down_proj"):
            found |= {name.replace("down_proj", f"{e}.down"): down for e, down in enumerate(parameter.grad)}
        else:
            found[name] = parameter.grad
    return found


def _plain(name: str) -> str:
    """A folder's tensor name as :func:`_theirs` has it."""
    if ".experts." in name:
        for ending, kind in (
            ("gate_proj", "gate"),
            ("up_proj", "up"),
            ("down_proj", "down"),
            ("w1", "gate"),
            ("w3", "up"),
            ("w2", "down"),
        ):
            name = name.replace(f".{ending}.weight", f".{kind}")
    return name.replace("block_sparse_moe", "mlp")


@pytest.mark.parametrize("name", PEERS)
def test_logits_and_gradients(name, tmp_path):
    theirs = saved_peer(name, tmp_path / "hf")
    ours = load_hf_model(tmp_path / "hf", max_positions=32, backend="sdpa_math").requires_grad_(True)
    tokens = torch.randint(0, 288, (2, 33), generator=torch.Generator().manual_seed(2))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    a, b = ours(inputs), theirs(inputs).logits
    assert b.abs().max() > 1.0
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6 * b.abs().max().item())
    for logits in (a, b):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    family, expected = FAMILIES[theirs.config.model_type], _theirs(theirs)
    parameters, seen = dict(ours.named_parameters()), set()
    for piece in pieces(ours.shape, family):
        mine, other = piece.view(parameters[piece.name].grad), expected[_plain(piece.hf)]
        assert mine.shape == other.shape
        assert (mine - other).norm() <= 2e-5 * other.norm(), piece.hf
        assert other.norm() > 0, piece.hf
        seen.add(_plain(piece.hf))
    assert seen == expected.keys(), "every gradient of theirs was compared"
