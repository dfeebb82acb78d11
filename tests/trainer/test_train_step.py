import contextlib
from types import SimpleNamespace

import torch
from torch import nn

from parallelisms.gradient_norm import clip_grad_norm
from trainer.passes import Whole
from trainer.train_step import TrainStep
from trainer.validation import validate


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens, labels, positions=None, document_ids=None):
        logits = self.head(self.embedding(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def micro(rows: int, ignored: int = 0) -> SimpleNamespace:
    tokens = torch.randint(0, 11, (rows, 5))
    labels = tokens.roll(-1, 1)
    labels.flatten()[:ignored] = -100
    return SimpleNamespace(
        tokens=tokens,
        labels=labels,
        positions=None,
        document_ids=None,
        document_starts=None,
        document_names=[],
        text_bytes=rows + 7,
    )


def step_of(model, accept=lambda batch, result: True, max_norm=0.0) -> TrainStep:
    return TrainStep(
        model=model,
        passes=Whole(model, contextlib.nullcontext, lambda model, enabled: None),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        device=torch.device("cpu"),
        precision=contextlib.nullcontext,
        clip_grad_norm=clip_grad_norm,
        max_norm=max_norm,
        accept=accept,
    )


def batch_of(micro_batches) -> SimpleNamespace:
    valid = sum(int((m.labels != -100).sum()) for m in micro_batches)
    return SimpleNamespace(step=1, micro_batches=micro_batches, global_valid_tokens=valid)


def merged(micro_batches) -> SimpleNamespace:
    joined = {name: torch.cat([getattr(m, name) for m in micro_batches]) for name in ("tokens", "labels")}
    return SimpleNamespace(
        **joined, positions=None, document_ids=None, document_starts=None, document_names=[], text_bytes=0
    )


def test_accumulation_over_unequal_micro_batches_is_one_large_batch():
    parts = [micro(2), micro(2, ignored=7), micro(2, ignored=2)]
    a, b = Toy(), Toy()
    losses = step_of(a)(batch_of(parts)), step_of(b)(batch_of([merged(parts)]))
    torch.testing.assert_close(losses[0].loss_sum, losses[1].loss_sum)
    torch.testing.assert_close(losses[0].grad_norm, losses[1].grad_norm)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y)


def test_gradients_are_reduced_with_the_last_micro_batch_alone():
    calls = []
    step = step_of(Toy())
    step.passes.set_gradient_sync = lambda model, enabled: calls.append(enabled)
    step(batch_of([micro(1), micro(1), micro(1)]))
    assert calls == [False, False, True]


def test_the_norm_is_that_before_clipping_and_the_update_is_clipped():
    model, reference = Toy(), Toy()
    batch = batch_of([micro(3)])
    unclipped = step_of(reference)(batch)
    clipped = step_of(model, max_norm=0.01)(batch)
    torch.testing.assert_close(clipped.grad_norm, unclipped.grad_norm)
    moved = torch.cat([(x - y).flatten() for x, y in zip(model.parameters(), Toy().parameters(), strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.5 * 0.01), rtol=1e-3, atol=0)


def test_a_step_owes_nothing_to_the_gradient_of_the_one_before():
    batches = [batch_of([micro(2)]), batch_of([micro(3)])]
    model, reference = Toy(), Toy()
    step = step_of(model)
    for batch in batches:
        last = step(batch)
    for batch in batches:
        expected = step_of(reference)(batch)  # an optimizer of its own, and no gradient yet
        reference.zero_grad()
    torch.testing.assert_close(last.grad_norm, expected.grad_norm)


def test_a_refused_step_leaves_the_weights():
    model = Toy()
    step_of(model, accept=lambda batch, result: False)(batch_of([micro(2)]))
    for x, y in zip(model.parameters(), Toy().parameters(), strict=True):
        assert torch.equal(x, y)


def test_validation_is_the_token_mean_whatever_the_batches():
    model, parts = Toy(), [micro(2), micro(1, ignored=5), micro(3, ignored=4)]
    forward = step_of(model).forward
    model.train()
    whole = merged(parts)
    whole.text_bytes = 27
    one = validate(model, [whole], forward=forward, sum_over_ranks=lambda x: x)
    many = validate(model, parts, forward=forward, sum_over_ranks=lambda x: x)
    assert abs(one["validation_metrics/loss"] - many["validation_metrics/loss"]) < 1e-6
    bits = many["validation_metrics/loss"] * batch_of(parts).global_valid_tokens / 0.6931471805599453 / 27
    assert abs(many["validation_metrics/bits_per_byte"] - bits) < 1e-6
    assert model.training
    seen = []
    validate(model, parts, forward=lambda m: seen.append(model.training) or forward(m), sum_over_ranks=lambda x: x)
    assert seen == [False] * 3
    assert all(p.grad is None for p in model.parameters())


def test_ranks_that_share_sequences_count_their_tokens_once():
    """Two ranks of a sequence each compute half of its loss, and one of them counts its tokens and bytes."""
    model, parts, sums = Toy(), [micro(2), micro(1)], []
    forward = step_of(model).forward
    for counts in (True, False):
        validate(
            model,
            parts,
            forward=lambda m: forward(m) / 2,
            sum_over_ranks=lambda x: sums.append(x.clone()) or torch.ones(3),
            counts=counts,
        )
    alone = validate(model, parts, forward=forward, sum_over_ranks=lambda x: x)
    together = validate(model, parts, forward=forward, sum_over_ranks=lambda x: sums[0] + sums[1])
    assert together == alone
    assert sums[1].tolist()[1:] == [0, 0]
