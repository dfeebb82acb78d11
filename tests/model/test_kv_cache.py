"""Passes through the cache give the logits of one pass over everything."""

import pytest
import torch

from model.kv_cache import cached
from tests.generation.models import LONGEST, SHAPES, VOCABULARY, decoder

PASSES = {"a token at a time": [7] + [1] * 9, "chunks": [5, 4, 1, 6]}


def inputs(padding: list[int], length: int = 16) -> dict[str, torch.Tensor]:
    """Rows with so many columns of padding on their left."""
    tokens = torch.randint(0, VOCABULARY, (len(padding), length), generator=torch.Generator().manual_seed(1))
    before = torch.tensor(padding)[:, None]
    column = torch.arange(length)
    found = {"tokens": tokens, "positions": (column - before).clamp(min=0)}
    if any(padding):
        found["document_ids"] = torch.where(column < before, -1, 0).int()
    return found


@pytest.mark.parametrize("padding", [[0, 0], [0, 3, 6]], ids=["equal", "padded"])
@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("kind", SHAPES)
def test_passes_through_the_cache_are_one_pass(kind, passes, padding):
    model, given = decoder(SHAPES[kind]), inputs(padding)
    whole = model(**given)
    backends = [model.backend, *(layer.attention.backend for layer in model.layers.values())]
    parts, start = [], 0
    with cached(model, 16):
        for size in PASSES[passes]:
            parts.append(model(**{name: x[:, start : start + size] for name, x in given.items()}))
            start += size
    real = torch.ones(whole.shape[:2], dtype=torch.bool)
    if any(padding):
        real = given["document_ids"] == 0
    torch.testing.assert_close(torch.cat(parts, 1)[real], whole[real], rtol=1e-5, atol=1e-5)
    assert [model.backend, *(layer.attention.backend for layer in model.layers.values())] == backends


def test_a_padded_row_has_the_logits_of_the_row_alone():
    model, given = decoder(SHAPES["grouped_queries"]), inputs([0, 6])
    torch.testing.assert_close(model(**given)[1, 6:], model(given["tokens"][1:, 6:])[0], rtol=1e-5, atol=1e-5)


def test_the_cache_holds_keys_of_the_new_tokens_alone():
    model, given = decoder(SHAPES["grouped_queries"]), inputs([0])
    lengths = []
    hook = model.layers["0"].attention.wk.register_forward_hook(lambda m, a, out: lengths.append(out.shape[1]))
    with cached(model, LONGEST):
        for start, end in ((0, 10), (10, 11), (11, 12)):
            model(given["tokens"][:, start:end], positions=given["positions"][:, start:end])
    hook.remove()
    assert lengths == [10, 1, 1]


def test_a_cache_that_is_full_says_so():
    model, given = decoder(SHAPES["grouped_queries"]), inputs([0])
    with cached(model, 15), pytest.raises(ValueError, match="room for 15 tokens, not for 16"):
        model(**given)
