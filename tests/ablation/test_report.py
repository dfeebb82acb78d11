"""The report's files: numbers equal report.json, nothing outside is needed, only its own files are replaced."""

from __future__ import annotations

import builtins
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ablation.compare import compare_directories
from ablation.document import digits, lookup
from ablation.report import write_report
from ablation.report_content import content
from ablation.report_markdown import render_markdown
from ablation.report_noise import noise_cards
from ablation.wording import verdict_line
from tests.ablation.synthetic import Arm, three_arms, write_ablation


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("report")
    failed = root / "weight_decay" / "wd_0.2" / "seed2-1gpu"
    write_ablation(root, three_arms(), question={"expected": "loss-neutral"})
    (failed / "DONE").rename(failed / "FAILED")
    (failed / "FAILED").write_text(json.dumps({"steps": 60, "reason": "lost a rank"}))
    result, place = compare_directories([root / "weight_decay"])
    assert write_report(result, place) == []
    return place


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str, str]] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self._open: tuple[str, str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "data":
            self._open = (given["value"], given["data-kind"])
        for name in ("src", "href", "xlink:href", "srcset", "action", "poster"):
            if name in given:
                self.links.append(given[name])
        if tag in ("script", "link", "iframe", "object", "embed", "base"):
            self.links.append(f"<{tag}>")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._open:
            self.numbers.append((*self._open, data))
            self._open = None


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page((folder / "report.html").read_text())


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


def test_every_number_of_the_page_is_that_of_report_json(page, result):
    assert len(page.numbers) > 150
    for path, kind, text in page.numbers:
        value = lookup(result, path)
        value = {"plain": value, "change": 100 * (value - 1), "percent": 100 * value}[kind]
        shown = text.replace("−", "-").replace(",", "")
        decimals = len(shown.partition(".")[2].partition("e")[0])
        tolerance = 0.5 * 10.0**-decimals * (1 + 1e-9) if "e" not in shown else 0.01 * abs(value)
        assert abs(float(shown) - value) <= tolerance, (path, kind, text, value)


def test_the_first_screen_comes_first(page, result):
    text = "".join(page.words)
    first = text[text.index("Which weight decay") : text.index("Question and change")]
    for part in (
        "wd_0.01",
        "INVALID",
        "loss difference",
        "tokens/s/device",
        "peak memory",
        "GiB",
        "device-hours",
        "validity",
    ):
        assert part in first
    assert "Violated expectation: loss-neutral was expected" in first
    assert result["comparisons"][1]["loss"]["word"] == "INVALID" and "lost a rank" in first


def test_each_verdict_stands_beside_its_own_interval(tmp_path):
    result, _ = compare_directories([write_ablation(tmp_path, three_arms())])
    comparison = result["comparisons"][0]
    loss, speed = comparison["loss"], comparison["speed"]
    assert loss["word"] != speed["word"] and loss["interval"] != loss["interval_95"], "or the line could not be wrong"
    told = verdict_line(result, 0).replace("−", "-").partition("; ")
    low, high = (f"{end:+.4f}" for end in loss["interval"])
    assert told[2].startswith(f"loss {loss['value']:+.4f} [{low}, {high}], {loss['phrase']}; ")
    low, high = (f"{100 * (end - 1):+.1f}" for end in speed["interval"])
    assert (
        told[0] == f"wd_0.01 vs wd_0.1: tokens/s {100 * (speed['value'] - 1):+.1f} % [{low}, {high}], {speed['phrase']}"
    )


def test_what_is_wrong_stands_on_the_card_and_is_counted(tmp_path):
    root = write_ablation(tmp_path, {name: three_arms()[name] for name in ("wd_0.1", "wd_0.01")})
    for path in root.glob("*/seed*/environment.json"):
        other = {"hostname_hash": "elsewhere"} if path.parent.parent.name == "wd_0.01" else {}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"git_dirty": True} | other))
    result, _ = compare_directories([root])
    text = render_markdown(content(result, set()))
    first = text[: text.index("## ")]
    assert "same host and device model: seed 1: hostname_hash 5b1f0c77aa12 and elsewhere" in first
    assert "unpaired, 1 broken, 1 warning" in first
    assert "wd_0.01: 2 of 20 not ok" in text
    (root / "wd_0.01" / "seed2-1gpu" / "DONE").unlink()
    result, _ = compare_directories([root])
    assert "1 did not finish" in render_markdown(content(result, set()))


def test_the_command_that_reproduces_has_what_was_typed_behind_the_name(tmp_path):
    root = write_ablation(tmp_path / "a folder", three_arms())
    typed = ["--training.steps", "60", "--data.name", "two words"]
    for path in root.glob("*/seed*/run.json"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps(record | {"command": record["command"] + typed}))
    result, _ = compare_directories([root])
    text = render_markdown(content(result, set()))
    assert "NGPU=1 ./run_ablation.sh weight_decay --training.steps 60 --data.name 'two words'\n" in text
    assert f"tensorboard --logdir '{root}'" in text or f"tensorboard --logdir '{os.path.relpath(root)}'" in text
    path.write_text(json.dumps(record | {"command": record["command"] + typed[:2]}))  # one run was started otherwise
    result, _ = compare_directories([root])
    assert "./run_ablation.sh weight_decay\n" in render_markdown(content(result, set()))


@pytest.mark.parametrize("aa", [False, True])
def test_a_caption_speaks_of_a_band_where_one_is_drawn(tmp_path, aa):
    result, _ = compare_directories([write_ablation(tmp_path, three_arms(), question={"aa": aa})])
    text = render_markdown(content(result, {"verdict_loss", "verdict_speed", "loss_difference"}))
    assert "Shaded: the band." in text  # equivalent_within
    assert ("Shaded: the speed band." in text) == aa
    assert "Shaded: twice what seeds of the baseline differ by." in text
    for arm in result["arms"].values():  # measured too rarely for a curve: the training loss is drawn, without a band
        for curve in arm["curves"].values():
            curve["metric"]["values"] = curve["metric"]["values"][:3]
    text = render_markdown(content(result, {"verdict_loss", "verdict_speed", "loss_difference"}))
    assert "Shaded: twice" not in text and "Difference from the baseline" in text


def test_an_end_beyond_all_measure_is_not_written_out(tmp_path):
    result, _ = compare_directories([write_ablation(tmp_path, three_arms())])
    result["comparisons"][0]["speed"] |= {"value": 0.4, "interval": [1e-9, 1.2e12]}
    text = render_markdown(content(result, set()))
    assert "[−100.0, > +1,000]" in text and "000,000" not in text


def test_an_a_a_interval_without_its_null_is_called_a_winner(tmp_path):
    result, _ = compare_directories([write_ablation(tmp_path, {"wd_0.1": Arm()}, question={"variable": ""})])
    for interval, winner in (([0.001, 0.004], True), ([-0.004, -0.001], True), ([-0.001, 0.001], False)):
        result["aa"]["wd_0.1"]["loss"]["against_itself"]["interval"] = interval
        (badge, *_) = noise_cards(result)[0].badges
        assert ("a winner" in badge[1].text) == winner


def test_the_page_needs_nothing_from_outside(page, folder):
    text = (folder / "report.html").read_text()
    assert [link for link in page.links if not link.startswith("#")] == []
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text and text.count("<svg") >= 6


def test_markdown_says_the_same_and_shows_the_pictures(folder, result):
    text = (folder / "report.md").read_text()
    for line in result["lines"]:
        assert line in text
    names = re.findall(r"\]\((\w+\.png)\)", text)
    assert len(names) >= 6 and all((folder / name).read_bytes().startswith(b"\x89PNG") for name in names)
    for heading in (
        "Question and change",
        "Validity",
        "Paired tables",
        "Curves",
        "Environment",
        "Reproduce",
        "Every run",
    ):
        assert f"## {heading}" in text
    assert text.index("## Reproduction checklist") > text.index("## Curves")


def test_all_runs_are_listed_failed_ones_too(page, result):
    text = "".join(page.words)
    assert len(result["runs"]) == 15 and "FAILED: lost a rank" in text and "1 did not finish" in text
    assert "1-3, 10, 20, 30, 40, 50, 60" in text


def test_the_checklist_marks_what_is_missing(tmp_path):
    moe = {"parameters": {"total": 6_840_000_000, "active": 1_210_000_000}}
    folder = write_ablation(tmp_path, three_arms(), gpus=2, record=moe, question={"aa": False})
    result, _ = compare_directories([folder])
    states = {row["item"]: row["state"] for row in result["checklist"]}
    assert states == {
        "hardware": "filled", "topology": "missing", "communication baseline": "missing", "dense baseline": "missing",
        "total and active parameters": "filled", "memory": "filled", "expert and device load": "missing",
        "router precision and score function": "missing", "loss beside throughput": "filled",
        "seeds and window": "filled",
    }  # fmt: skip
    parameters = next(row for row in result["checklist"] if row["item"] == "total and active parameters")
    assert "6.84 B / 1.21 B" in parameters["text"]


def test_without_a_gpu_the_hardware_is_the_cpu(tmp_path):
    folder = write_ablation(tmp_path, three_arms(), environment={"gpu_name": None, "clocks": None})
    result, _ = compare_directories([folder])
    assert {row["item"]: row["text"] for row in result["checklist"]}["hardware"] == "1 x Example CPU"
    assert all(item["status"] == "ok" for c in result["comparisons"] for item in c["validity"])


def test_expert_load_is_drawn_when_it_was_logged(tmp_path):
    folder = write_ablation(
        tmp_path, three_arms(), question={"aa": False}, change_line=lambda line: line.update({"moe/dead_experts": 3.0})
    )
    for number, path in enumerate(sorted(folder.glob("*/seed*"))):
        counts = [[10, 30, 20, 20], [80, 0, 0, 0]] if number % 2 else [[30, 10, 20, 20], [80, 0, 0, 0]]
        lines = [{"step": 50, "counts": [[20] * 4] * 2}, {"step": 60, "counts": counts}]
        (path / "moe_loads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result, place = compare_directories([folder])
    load = result["arms"]["wd_0.01"]["expert_load"]  # its seeds hold one, the other, and the one again
    assert [pytest.approx(row) for row in load] == [[3.5 / 3, 2.5 / 3, 1.0, 1.0], [4.0, 0.0, 0.0, 0.0]]
    dead = next(row for row in result["comparisons"][0]["metrics"] if row["name"] == "experts without a token")
    assert dead["baseline"]["mean"] == 3.0 and dead["value"] == 0.0
    write_report(result, place)
    assert (place / "expert_load.png").exists() and "Expert load" in (place / "report.md").read_text()


def test_making_it_again_replaces_only_its_own_files(tmp_path):
    folder = write_ablation(tmp_path, three_arms(), question={"aa": False})
    result, place = compare_directories([folder])
    write_report(result, place)
    (place / "notes.txt").write_text("mine")
    (place / "tb" / "mine").write_text("mine too")
    stale = place / "variable.png"
    assert stale.exists()
    for arm in ("wd_0.2",):
        for path in (folder / arm).glob("*/run.json"):
            path.unlink()
    outside = tmp_path / "outside.txt"
    outside.write_text("not yours")
    old = json.loads((place / "report.json").read_text())
    (place / "report.json").write_text(json.dumps(old | {"files": [*old["files"], "../../outside.txt"]}))
    result, place = compare_directories([folder])
    write_report(result, place)
    assert (place / "notes.txt").read_text() == "mine" and (place / "tb" / "mine").exists()
    assert outside.exists() and not stale.exists()  # two arms make no curve over the variable
    files = json.loads((place / "report.json").read_text())["files"]
    assert {str(p.relative_to(place)) for p in place.rglob("*") if p.is_file()} == {*files, "notes.txt", "tb/mine"}


def test_without_matplotlib_the_report_says_so(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    folder = write_ablation(tmp_path, three_arms(), question={"aa": False})
    result, place = compare_directories([folder])
    monkeypatch.setattr(builtins, "__import__", without)
    notes = write_report(result, place)
    assert notes == ["No figures: matplotlib is not installed (pip install matplotlib, the report extra)."]
    assert not list(place.glob("*.png")) and "No figures: matplotlib" in (place / "report.html").read_text()


def test_tensorboard_shows_verdict_and_diff(folder, result):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tb"), size_guidance={"tensors": 0})
    events.Reload()
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert result["lines"][0] in texts["report/verdict"]
    assert "optimizer.weight_decay" in texts["report/config_diff"]


def test_the_first_screen_of_only_a_a_says_whether_it_found_a_winner(tmp_path):
    folder = write_ablation(tmp_path, {"wd_0.1": Arm()}, name="aa", question={"variable": ""})
    result, place = compare_directories([folder])
    write_report(result, place)
    text = (place / "report.md").read_text()
    first = text[: text.index("## ")]
    for part in ("no winner", "loss, disjoint seeds", "tokens/s, same seeds", "| identical |", "| valid |"):
        assert part in first
    assert "## Validity" in text and "wd_0.1, disjoint seeds: all" in text
    lines = (folder / "wd_0.1" / "seed2-1gpu-repeat1" / "metrics.jsonl").read_text().replace('"step": 60', '"step": 61')
    (folder / "wd_0.1" / "seed2-1gpu-repeat1" / "metrics.jsonl").write_text(lines)
    result, place = compare_directories([folder])
    write_report(result, place)
    assert "broken" in (place / "report.md").read_text().partition("## ")[0]


def test_names_are_escaped(tmp_path, monkeypatch):
    monkeypatch.setattr("ablation.report.draw_all", lambda result: {})
    arms = {"wd_0.1": Arm(), "x": Arm({"optimizer.weight_decay": 0.01})}
    folder = write_ablation(tmp_path, arms, question={"question": "<script>alert(1)</script> a|b", "aa": False})
    result, place = compare_directories([folder])
    write_report(result, place)
    assert "<script>" not in (place / "report.html").read_text() and "a\\|b" in (place / "report.md").read_text()


@pytest.mark.parametrize(
    ("value", "decimals", "sign", "text"),
    [
        (0.00041, 4, True, "+0.0004"), (-0.0011, 4, True, "−0.0011"), (-0.00001, 4, True, "0.0000"),
        (20276.4, None, False, "20,276"), (0.10123, None, False, "0.101"), (3.0, None, False, "3"),
        (0.00168, None, False, "0.00168"), (48.163, None, False, "48.16"),
    ],
)  # fmt: skip
def test_numbers_for_people(value, decimals, sign, text):
    assert digits(value, decimals, sign=sign) == text
