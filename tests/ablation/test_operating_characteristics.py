"""What the report promises, over whole run directories: how often A/A names a winner, how often an effect is found."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ablation.result import build_result
from ablation.runs import find_runs
from tests.ablation.synthetic import Arm, write_ablation

LOSS = 3.05  # where the synthetic runs end
OPEN = {"metric": "validation_metrics/loss", "step": 60}


def compared(root: Path, name: str, truth: Arm, seeds: int, **question: Any) -> dict[str, Any]:
    """The comparison of one arm with its baseline, from fresh run directories that are removed again."""
    arms = {
        "wd_0.1": Arm({"optimizer.weight_decay": 0.1}),
        "wd_0.2": Arm({"optimizer.weight_decay": 0.2}, truth.loss, truth.speed),
    }
    asked = {"seeds": list(range(1, seeds + 1))} | question
    folder = write_ablation(root, arms, name=name, question=asked)
    result = build_result(find_runs([folder]))
    shutil.rmtree(folder)
    return result["comparisons"][0]


@pytest.mark.slow
def test_of_500_a_a_comparisons_at_most_35_are_called_better_or_worse(tmp_path):
    """Without a band, which is the harder case."""
    named = {"loss": 0, "speed": 0}
    for i in range(500):
        comparison = compared(tmp_path, f"q{i}", Arm(), 3, aa=False, decide=OPEN)
        for part in named:
            named[part] += comparison[part]["word"] in ("better", "worse")
    assert max(named.values()) <= 35, named


@pytest.mark.slow
def test_planted_effects_are_found_at_the_recommended_number_of_seeds(tmp_path):
    """1 % of the loss and 3 % of the speed, with A/A bands. Seeds are added once, as many as a pilot of 3 asks for."""
    truth, found = Arm(loss=-0.01 * LOSS, speed=0.97), {"loss": 0, "speed": 0}
    for i in range(200):
        pilot = compared(tmp_path, f"q{i}", truth, 3, decide=OPEN)
        seeds = max(pilot[part]["needs"] or 3 for part in found)
        whole = pilot if seeds == 3 else compared(tmp_path, f"q{i}", truth, min(seeds, 30), decide=OPEN)
        for part, word in (("loss", "better"), ("speed", "worse")):
            verdict = pilot if pilot[part]["word"] != "inconclusive" else whole
            found[part] += verdict[part]["word"] == word
    assert min(found.values()) >= 160, found
