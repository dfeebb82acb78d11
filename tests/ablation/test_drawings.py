"""What is drawn is what report.json holds: intervals that decide, bands, differences by seed, the right axis."""

from __future__ import annotations

from typing import Any

import pytest

from ablation.drawings import DRAWINGS
from ablation.result import build_result
from ablation.runs import find_runs
from tests.ablation.synthetic import Noise, three_arms, write_ablation

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict[str, Any]:
    """Two arms, so that the deciding interval is wider than the one at 95 %, and repeats that differ by more than the
    widest band of speed.
    """
    undeclared = {"decide": {"metric": "validation_metrics/loss", "step": 60}}
    folder = write_ablation(tmp_path_factory.mktemp("runs"), three_arms(), noise=Noise(speed=0.1), question=undeclared)
    return build_result(find_runs([folder]))


def drawn(result: dict[str, Any], name: str) -> Any:
    return DRAWINGS[name](result).axes[0]


def lines(axes: Any) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines]


def shade(axes: Any, axis: int) -> tuple[float, float]:
    """From where to where the band reaches."""
    (patch,) = axes.patches
    ends = patch.get_patch_transform().transform(patch.get_path().vertices)[:, axis]
    return min(ends), max(ends)


def test_verdicts_show_the_interval_that_decided_and_the_band(result):
    axes, speeds = drawn(result, "verdict_loss"), drawn(result, "verdict_speed")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["wd_0.2", "wd_0.01"]
    assert shade(axes, 0) == pytest.approx((-result["decision"]["band"], result["decision"]["band"]))
    assert result["decision"]["speed_noise"] > result["decision"]["speed_band"] == pytest.approx(0.05)
    assert shade(speeds, 0) == pytest.approx((100 * (1 / 1.05 - 1), 5.0))
    assert any(c["loss"]["interval"] != c["loss"]["interval_95"] for c in result["comparisons"])
    for y, c in enumerate(reversed(result["comparisons"])):
        for part, panel, show in (("loss", axes, lambda v: v), ("speed", speeds, lambda v: 100 * (v - 1))):
            mine = [x for x, ys in lines(panel) if set(ys) == {y}]
            expected = (c[part]["interval"], list(c[part]["per_seed"].values()), [c[part]["value"]])
            assert mine == [pytest.approx([show(v) for v in values]) for values in expected]


def test_curves_are_those_of_each_seed_and_their_mean_over_the_axis_they_name(result):
    for name, axis in (("loss_tokens", "tokens"), ("loss_seconds", "seconds")):
        axes = drawn(result, name)
        assert axes.get_xlabel() == ("tokens" if axis == "tokens" else "training seconds")
        found = iter(lines(axes))
        for arm in result["arms"].values():
            curves = [curve["metric"] for curve in arm["curves"].values()]
            for curve in curves:
                assert next(found) == (curve[axis], curve["values"])
            means = [
                [sum(values) / len(curves) for values in zip(*(curve[of] for curve in curves), strict=True)]
                for of in (axis, "values")
            ]
            assert next(found) == (pytest.approx(means[0]), pytest.approx(means[1]))


def test_differences_are_candidate_minus_baseline_of_the_same_seed(result):
    axes = drawn(result, "loss_difference")
    band = result["aa"]["wd_0.1"]["loss"]["band"]
    assert shade(axes, 1) == pytest.approx((-band, band))
    found = iter(lines(axes))
    for c in result["comparisons"]:
        base, arm = (result["arms"][c[side]]["curves"] for side in ("baseline", "arm"))
        for seed, curve in arm.items():
            pairs = zip(base[seed]["metric"]["values"], curve["metric"]["values"], strict=True)
            expected = [after - before for before, after in pairs]
            assert next(found) == (curve["metric"]["tokens"], pytest.approx(expected))
        next(found)  # their mean
