"""Recompilations are counted once each, with torch's reason; the pair of graphs of training and validation is none."""

import logging

import pytest
import torch

from trainer.compilations import RECOMPILATIONS, Compilations


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "trainer.compilations"]


def scaled(x: torch.Tensor, by: int) -> torch.Tensor:
    return x * by


def test_a_changed_constant_is_counted_and_explained(caplog):
    watch, compiled = Compilations(), torch.compile(scaled, backend="eager", dynamic=False)
    assert not watch.happened()
    compiled(torch.ones(3), 2)
    assert watch.happened() and watch.recompilations == 0
    compiled(torch.ones(3), 2)
    assert not watch.happened()
    with caplog.at_level(logging.WARNING, logger="trainer.compilations"):
        compiled(torch.ones(3), 3)
        assert watch.happened() and watch.tags() == {RECOMPILATIONS: 1.0}
    (line,) = said(caplog)
    assert line.startswith("Recompiled scaled (test_compilations.py:") and "by" in line.split(": ", 1)[1]


def test_with_and_without_gradients_is_no_recompilation(caplog):
    watch, compiled = Compilations(), torch.compile(scaled, backend="eager", dynamic=False)
    weight = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        compiled(weight, 2)
    compiled(weight, 2)
    assert watch.happened() and watch.recompilations == 0 and not said(caplog)


def test_what_was_compiled_before_is_not_ours():
    torch.compile(scaled, backend="eager")(torch.ones(4), 2)
    assert not Compilations().happened()


def test_a_silent_watch_counts(caplog):
    watch, compiled = Compilations(speaks=False), torch.compile(scaled, backend="eager", dynamic=False)
    compiled(torch.ones(3), 2)
    compiled(torch.ones(5), 2)
    assert watch.happened() and watch.recompilations == 1 and not said(caplog)
