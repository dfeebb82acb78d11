"""Checks on the runs themselves: finished, finite, timed, below the device's peak, and consistent with their own
records.
"""

from __future__ import annotations

import math

from ablation.measures import median_step, value_at_tokens, warmup_end
from ablation.runs import TRAIN_LOSS, Run
from ablation.sides import Item, Sides, listed

MFU_TAGS = ("mfu(%)", "mfu_causal(%)")
SHORT_WINDOW = 20  # steps that count for throughput; fewer make the median a guess
THROTTLED_SECONDS = 1.0  # of a run, from which on its rates are not the card's


def _done(sides: Sides) -> Item:
    odd = []
    for run in sides.runs:
        if run.state != "DONE":
            reason = f": {run.finish['reason']}" if run.finish.get("reason") else ""
            odd.append(f"{run.name} {run.state}{reason}")
        elif run.lines and int(run.finish.get("steps", 0)) != int(run.lines[-1]["step"]):
            odd.append(f"{run.name} says {run.finish.get('steps')} steps and logs {run.lines[-1]['step']}")
    return Item("every run DONE", "INVALID" if odd else "ok", "; ".join(odd))


def _finite(sides: Sides) -> Item:
    odd = []
    for run in sides.runs:
        tags = (TRAIN_LOSS, "grad_norm", sides.metric)
        steps = sorted({step for tag in tags for step, value in run.series(tag) if not math.isfinite(value)})
        if steps:
            odd.append(f"{run.name} is not finite at step {steps[0]}")
        if run.finish.get("skipped_steps"):
            odd.append(f"{run.name} skipped {run.finish['skipped_steps']} steps")
    return Item("no NaN, no skipped step", "INVALID" if odd else "ok", "; ".join(odd))


def _memory(sides: Sides) -> Item:
    odd = []
    for run in sides.runs:
        for tag, what in (
            ("memory/num_alloc_retries", "allocation retries"),
            ("memory/num_ooms", "out-of-memory events"),
        ):
            most = max((value for _, value in run.series(tag)), default=0.0)
            if most > 0:
                odd.append(f"{run.name}: {most:.0f} {what}")
    return Item("no allocation retry, no OOM", "INVALID" if odd else "ok", "; ".join(odd), ("speed",))


def _interleaved(sides: Sides) -> Item:
    name = "interleaved order"
    if not all(run.started for run in sides.runs):
        return Item(name, "warning", "start times not recorded", ("speed",))
    if min(len(sides.baseline), len(sides.candidate)) < 2:
        return Item(name, "warning", "one pair has no order to interleave", ("speed",))
    spans = [(min(r.started for r in side), max(r.started for r in side)) for side in (sides.baseline, sides.candidate)]
    if spans[0][1] < spans[1][0] or spans[1][1] < spans[0][0]:
        return Item(
            name,
            "unpaired",
            "one side ran after the other was over: drift of the host looks like an effect",
            ("speed",),
        )
    return Item(name, "ok", spoils=("speed",))


def _clocks(sides: Sides) -> Item:
    """Nothing throttled at a run's start, end or, where the driver counts, between; the same limits on both sides."""
    name, limits = "clocks not throttled", ("max_sm_mhz", "power_limit_w")
    if all(not run.environment.get("gpu_name") for run in sides.runs):
        return Item(name, "ok", "no GPU", ("speed",))
    clocks = {run.name: run.environment.get("clocks") or {} for run in sides.runs}
    odd = [f"{run.name}: {listed(reasons)}" for run in sides.runs if (reasons := _throttled(run))]
    for limit in limits:
        values = {told[limit] for told in clocks.values() if told.get(limit) is not None}
        if len(values) > 1:
            odd.append(f"{limit} {listed(sorted(values))}")
    if odd:
        return Item(name, "INVALID", "; ".join(odd), ("speed",))
    unknown = not all(clocks.values())
    return Item(name, "warning" if unknown else "ok", "clocks not recorded" if unknown else "", ("speed",))


def _throttled(run: Run) -> list[str]:
    """Why the GPU was slower than it should be, each reason once, with its seconds where they are known."""
    begin, end = run.environment.get("clocks") or {}, run.record.get("clocks_at_end") or {}
    reasons = dict.fromkeys([*begin.get("throttled", []), *end.get("throttled", [])], "")
    before = begin.get("throttled_total_s") or {}
    for reason, total in (end.get("throttled_total_s") or {}).items():
        if (seconds := total - before.get(reason, total)) >= THROTTLED_SECONDS:
            reasons[reason] = f" for {seconds:.0f} s"
    return [reason + seconds for reason, seconds in reasons.items()]


def _below_peak(sides: Sides) -> Item:
    odd = []
    for run in sides.runs:
        points = [point for tag in MFU_TAGS for point in run.series(tag)]
        step, highest = max(points, key=lambda point: point[1], default=(0, 0.0))
        if highest > 100.0:
            odd.append(f"{run.name}: MFU {highest:.1f} % at step {step}")
    reason = "; ".join(odd) + ": above the device's peak, a measuring error" if odd else ""
    return Item("rates below the device's peak", "INVALID" if odd else "ok", reason, ("speed",))


def _records_agree(sides: Sides) -> Item:
    """Seeds, tokens and arms that are written in two places agree; no run is a copy of another seed's."""
    odd = []
    for run in sides.runs:
        for key, seed in (run.record.get("seeds") or {}).items():
            configured = run.config.get(f"debug.{key}", run.config.get("debug.seed"))
            if configured is not None and configured != seed:
                odd.append(f"{run.name}: {key} {seed} in run.json, {configured} in config.toml")
        batch, length = run.config.get("training.global_batch_size", -1), run.config.get("training.seq_len", 0)
        if batch > 0 and length and batch * length != run.tokens_per_step:
            odd.append(
                f"{run.name}: {run.tokens_per_step} tokens a step in run.json, {batch} x {length} in config.toml"
            )
        if any(
            int(line.get("tokens", 0)) != int(line["step"]) * run.tokens_per_step
            for line in run.lines
            if "tokens" in line
        ):
            odd.append(f"{run.name}: tokens in metrics.jsonl are not step x {run.tokens_per_step}")
        if any(not math.isfinite(s) or s <= 0 for s in run.step_times.values()):
            odd.append(f"{run.name}: a step time that is not positive")
        if run.tune and any(run.config.get(key) != value for key, value in run.tune.items()):
            odd.append(f"{run.name}: the tuned values in run.json are not those in config.toml")
    for side in (sides.baseline, sides.candidate):
        seen: dict[tuple[tuple[int, float], ...], Run] = {}
        for run in side:
            curve = tuple(run.series(TRAIN_LOSS))
            twin = seen.setdefault(curve, run)
            if curve and twin.seed != run.seed:
                odd.append(f"{run.name} and {twin.name} have the same losses on different seeds: one is a copy")
    return Item("records agree with each other", "INVALID" if odd else "ok", "; ".join(odd))


def _rule_unchanged(sides: Sides) -> Item:
    name = "decision rule unchanged"
    odd = {
        key for run in sides.runs for key in ("variable", "baseline", "expected", "decide", "tune")
        if run.question and run.question.get(key) != sides.question.get(key)
    }  # fmt: skip
    return Item(
        name, "INVALID" if odd else "ok", f"[ablation] {listed(sorted(odd))} differs between runs" if odd else ""
    )


def _measured(sides: Sides) -> Item:
    lost = [run.name for run in sides.runs if value_at_tokens(run, sides.metric, sides.tokens) is None]
    reason = f"no {sides.metric} at {sides.tokens:,.0f} tokens in {listed(lost)}" if lost else ""
    return Item("metric present at the decision", "INVALID" if lost else "ok", reason, ("loss",))


def _timed(sides: Sides) -> Item:
    lost = [run.name for run in sides.runs if median_step(run) is None]
    return Item(
        "step times present",
        "INVALID" if lost else "ok",
        f"none that count in {listed(lost)}" if lost else "",
        ("speed",),
    )


def _window(sides: Sides) -> Item:
    name = "decision after warm-up, window long enough"
    reasons = []
    for run in sides.runs:
        step, warmup = sides.tokens / run.tokens_per_step, int(run.config.get("lr_scheduler.warmup_steps", 0))
        if step <= warmup:
            reasons.append(f"{run.arm} decides at step {step:g}, inside its {warmup} warm-up steps")
        elif step < 2 * warmup:
            reasons.append(f"{run.arm} decides at step {step:g}, soon after its {warmup} warm-up steps")
        if 0 < len(run.steady_times) < SHORT_WINDOW:
            reasons.append(f"{run.arm} has {len(run.steady_times)} steps for throughput, fewer than {SHORT_WINDOW}")
        length = run.config.get("training.steps")
        if isinstance(length, int) and step < length - 0.5:
            reasons.append(f"{run.arm} decides at step {step:g} of {length}: its schedule is not over")
        if step <= warmup_end(run):
            reasons.append(f"{run.arm} decides before the timed window begins")
    return Item(name, "warning" if reasons else "ok", "; ".join(dict.fromkeys(reasons)))


CHECKS = (
    _done, _finite, _memory, _interleaved, _clocks, _below_peak, _records_agree, _rule_unchanged, _measured, _timed,
    _window,
)  # fmt: skip
