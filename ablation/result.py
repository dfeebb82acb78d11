"""Runs in, everything a report says out, as one dictionary: arms, decision, bands, comparisons, evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ablation.aa import noise_bands, noise_validity
from ablation.comparisons import (
    Comparison,
    compare_sides,
    comparison_table,
    difference,
    finite_values,
    judge_parts,
    summary,
)
from ablation.contrasts import contrasts
from ablation.evidence import asked_with, checklist, commands, curves, environment, expert_load, run_row
from ablation.measures import throughput, value_at_tokens
from ablation.runs import TRAIN_LOSS, VALIDATION_LOSS, Run, latest_question
from ablation.sameness import moved_settings
from ablation.sides import Sides, declared_variables
from ablation.statistics import CONFIDENCE
from ablation.tuning import Tuned, best_point
from config.errors import ConfigError

SCHEMA = 1
WIDEST_SPEED_BAND = math.log1p(0.05)  # within more than this "equivalent" would say nothing: noise gives no licence


@dataclass(frozen=True)
class Rule:
    """How plain runs are decided; an ablation's own file says it for its runs. ``step`` 0: the last one."""

    metric: str = ""
    step: int = 0
    equivalent_within: float | None = None


@dataclass
class _Arms:
    """Runs of one directory (or list) by arm, with their [ablation] table."""

    runs: list[Run]
    question: dict[str, Any]
    baseline: str
    by_arm: dict[tuple[str, int], list[Run]] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: Sequence[Run]) -> _Arms:
        names = {run.ablation for run in runs}
        if len(names) > 1:
            told = ", ".join(sorted(name or "plain runs" for name in names))
            raise ConfigError(
                f"compare: runs of several ablations ({told}); compare one at a time, the other with --against"
            )
        question = latest_question(runs)
        arms = cls(list(runs), question, str(question.get("baseline") or runs[0].arm))
        for run in runs:
            # Plain arms are already split by device count, and there the count may be the variable.
            arms.by_arm.setdefault((run.arm, run.world_size if question else 0), []).append(run)
        return arms

    def names(self) -> list[str]:
        """Arms in order: baseline, candidates as found, references."""
        references = self.question.get("references") or []
        found = dict.fromkeys(name for name, _ in self.by_arm)
        return sorted(found, key=lambda name: (name != self.baseline, name in references))

    def counts(self) -> list[int]:
        """Device counts, ascending; [0] for plain runs."""
        return sorted({count for _, count in self.by_arm})


def _decision(arms: _Arms, rule: Rule) -> tuple[str, int, float]:
    """Metric, step and tokens of the decision: the step of the arm that has seen the fewest tokens by then."""
    decide = arms.question.get("decide") or {}
    metric = str(decide.get("metric") or rule.metric)
    if not metric:
        metric = VALIDATION_LOSS if all(run.series(VALIDATION_LOSS) for run in arms.runs) else TRAIN_LOSS
    step = int(decide.get("step") or rule.step)
    ends = []
    for run in arms.runs:
        length = run.config.get("training.steps") or (run.lines[-1]["step"] if run.lines else 0)
        ends.append((step or int(length)) * run.tokens_per_step)
    tokens = min(ends)
    baseline = next((run for run in arms.runs if run.arm == arms.baseline), arms.runs[0])
    return metric, round(tokens / baseline.tokens_per_step), float(tokens)


def build_result(runs: Sequence[Run], older: Sequence[Run] = (), rule: Rule | None = None) -> dict[str, Any]:
    """Everything a report says, as one JSON-ready dictionary.

    Args:
        runs: of one ablation, or plain runs (arms by configuration; the first is the baseline).
        older: runs of the same ablation from another time. Its arms that ``runs`` lacks are bridged over the
            baseline.
        rule: decision for plain runs.

    Raises:
        ConfigError: several ablations at once, or no baseline on either side.
    """
    arms = _Arms.of(runs)
    metric, step, tokens = _decision(arms, rule or Rule())
    past = _Arms.of(older) if older else None
    if past is not None and not any(name == arms.baseline for name, _ in (*arms.by_arm, *past.by_arm)):
        raise ConfigError(f"compare: no run of the baseline {arms.baseline!r} on either side")
    if past is None and not any(name == arms.baseline for name, _ in arms.by_arm):
        raise ConfigError(
            f"compare: no run of the baseline {arms.baseline!r}; add its runs, or an older directory: --against"
        )
    comparisons: list[Comparison] = []
    tunes: dict[str, list[dict[str, Any]]] = {}
    bands: dict[str, Any] = {}
    chosen: dict[str, list[Run]] = {}
    drift: dict[str, Any] = {}
    for count in arms.counts():
        tuned = {name: _tuned(arms, name, count, metric, tokens) for name in arms.names()}
        own = tuned.get(arms.baseline)
        old = _tuned(past, arms.baseline, count, metric, tokens) if past else None
        base = own or old
        if base is None:
            continue
        baseline_label = _label(arms, arms.baseline, count)
        candidates = {n: t for n, t in tuned.items() if t is not None and n != arms.baseline}
        paired = _paired_seeds(arms.question, [t.runs for t in candidates.values()], base.runs)
        again = Sides(_side(base.noise, paired), base.noise, arms.question, metric, tokens)
        bands[baseline_label] = noise_bands(base.noise, paired, metric, tokens) | {"validity": noise_validity(again)}
        first = _side(base.runs, paired)
        chosen[baseline_label] = first
        tunes.update({_label(arms, n, count): t.points for n, t in tuned.items() if t is not None and t.points})
        for name, arm in candidates.items():
            mine = [run for run in arm.runs if run.repeat == 0]
            role = "reference" if name in (arms.question.get("references") or []) else "candidate"
            sides = Sides(first, mine, arms.question, metric, tokens)
            tier = "paired" if own else "unpaired"
            label = _label(arms, name, count)
            chosen[label] = mine
            comparisons.append(compare_sides(label, baseline_label, role, sides, [*base.items, *arm.items], tier=tier))
        if past is not None and own is not None and old is not None:
            drift[baseline_label] = _drift(old.runs, own.runs, metric, tokens)
            comparisons += _bridged(past, arms, count, metric, tokens, chosen)
    return _result(arms, past, comparisons, (metric, step, tokens), rule or Rule(), bands, tunes, chosen, drift)


def _tuned(arms: _Arms | None, name: str, count: int, metric: str, tokens: float) -> Tuned | None:
    found = arms.by_arm.get((name, count)) if arms else None
    return best_point(found, arms.question, metric, tokens) if arms and found else None


def _label(arms: _Arms, name: str, count: int) -> str:
    return f"{name} on {count}" if len(arms.counts()) > 1 else name


def _paired_seeds(question: dict[str, Any], candidates: list[list[Run]], baseline: list[Run]) -> list[str]:
    """Seeds of the comparison; the baseline's further ones measure noise."""
    asked = [str(seed) for seed in question.get("seeds") or []]
    tried = [run.seed for runs in candidates for run in runs]
    return list(dict.fromkeys([*asked, *tried])) or [run.seed for run in baseline]


def _side(baseline: list[Run], seeds: list[str]) -> list[Run]:
    """The baseline's runs that candidates meet: those of their seeds, else all; repeats are for the noise only."""
    originals = [run for run in baseline if run.repeat == 0] or baseline
    return [run for run in originals if run.seed in seeds] or originals


def _bridged(
    past: _Arms, arms: _Arms, count: int, metric: str, tokens: float, chosen: dict[str, list[Run]]
) -> list[Comparison]:
    """Arms that only the older directory has, against the older baseline that ran with them."""
    base = _tuned(past, arms.baseline, count, metric, tokens)
    base_label = f"{_label(arms, arms.baseline, count)} (older)"
    bridged: list[Comparison] = []
    for name in past.names():
        arm = _tuned(past, name, count, metric, tokens)
        if base is None or arm is None or name == arms.baseline or (name, count) in arms.by_arm:
            continue
        mine = [run for run in arm.runs if run.repeat == 0]
        seeds = _paired_seeds(past.question, [mine], base.runs)
        first = _side(base.runs, seeds)
        role = "reference" if name in (past.question.get("references") or []) else "candidate"
        label = f"{_label(arms, name, count)} (older)"
        chosen |= {base_label: first, label: mine}
        sides = Sides(first, mine, past.question, metric, tokens)
        bridged.append(compare_sides(label, base_label, role, sides, [*base.items, *arm.items], tier="bridged"))
    return bridged


def _drift(old: Sequence[Run], new: Sequence[Run], metric: str, tokens: float) -> dict[str, Any]:
    """The baseline now against the baseline then: loss difference and tokens/s ratio, paired by seed where seeds
    agree. ``moved``: what else has changed; then there are no numbers, which would pass for a drift of the machine.
    """
    table: dict[str, Any] = {"loss": None, "speed": None, "moved": moved_settings(old[0], new[0])}
    if table["moved"]:
        return table
    sides = [{run.seed: run for run in reversed(runs) if run.repeat == 0} for runs in (old, new)]
    for name, of in (("loss", lambda run: value_at_tokens(run, metric, tokens)), ("speed", throughput)):
        values = [finite_values(list(side.values()), of) for side in sides]
        if name == "speed":
            values = [{seed: math.log(v) for seed, v in side.items()} for side in values]
        estimate = difference(values[0], values[1], paired=bool(values[0].keys() & values[1].keys()))
        table[name] = estimate.table(math.exp if name == "speed" else float) if estimate else None
    return table


def _result(
    arms: _Arms,
    past: _Arms | None,
    comparisons: list[Comparison],
    decision: tuple[str, int, float],
    rule: Rule,
    bands: dict[str, Any],
    tunes: dict[str, Any],
    chosen: dict[str, list[Run]],
    drift: dict[str, Any],
) -> dict[str, Any]:
    metric, step, tokens = decision
    decide = arms.question.get("decide") or {}
    margin = decide.get("equivalent_within", rule.equivalent_within)
    loss_aa = [b["loss"] for b in bands.values() if b["loss"]]
    speed_aa = [b["speed"] for b in bands.values() if b["speed"]]
    # Over several device counts the widest band holds for all.
    noise = max((b["spread"] for b in loss_aa), default=None)
    if margin is not None:
        band, source = float(margin), "equivalent_within"
    elif arms.question.get("aa") and loss_aa:
        band, source = max(b["band"] for b in loss_aa), "A/A runs"
    else:
        band, source = 0.0, "none: no equivalence can be claimed"
    noisiest = max((b["log_band"] for b in speed_aa), default=0.0)
    speed_band = min(noisiest, WIDEST_SPEED_BAND)
    losses = judge_parts(comparisons, "loss", metric, band, noise)
    speeds = judge_parts(comparisons, "speed", metric, speed_band, None)
    expected = str(arms.question.get("expected", ""))
    tables = [
        comparison_table(c, loss, speed, expected) for c, loss, speed in zip(comparisons, losses, speeds, strict=True)
    ]
    runs = [*arms.runs, *(past.runs if past else [])]
    references = arms.question.get("references") or []
    roles = {label: "baseline" for label in chosen} | {c.label: c.role for c in comparisons}
    return {
        "schema": SCHEMA,
        "name": arms.runs[0].ablation or "comparison",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "question": arms.question,
        "variables": declared_variables(arms.question) or sorted({k for t in tables for k in t["variable"]}),
        "baseline": arms.baseline,
        "references": references,
        "decision": {
            "metric": metric, "step": step, "tokens": tokens, "band": band, "band_source": source,
            "speed_band": math.expm1(speed_band), "speed_noise": math.expm1(noisiest), "confidence": CONFIDENCE,
            "family": sum(t["role"] == "candidate" and t["loss"]["word"] != "INVALID" for t in tables),
        },
        "aa": bands,
        "drift": drift,
        "comparisons": tables,
        "contrasts": contrasts(str(arms.question.get("design") or ""), comparisons),
        "arms": {
            label: {
                "role": roles[label], "devices": members[0].world_size,
                "seeds": [run.seed for run in members], "config": _variable_values(members[0], tables),
                "metric": summary(finite_values(members, lambda run: value_at_tokens(run, metric, tokens))),
                "rate": summary(finite_values(members, throughput)),
                "curves": {run.seed: curves(run, metric) for run in members},
                "expert_load": expert_load(members),
            }
            for label, members in chosen.items()
        },
        "tune": tunes,
        "environment": environment(runs),
        "asked_with": asked_with(runs),
        "commands": commands(runs),
        "checklist": checklist(runs, tables),
        "runs": [run_row(run, run.arm, metric, tokens) for run in runs],
        "left_nothing": [],
    }  # fmt: skip


def _variable_values(run: Run, tables: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: run.config.get(key) for key in sorted({k for table in tables for k in table["variable"]})}
