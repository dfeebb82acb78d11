"""The predicted bubble against the order in which torch's schedules run their actions."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _ComputationType, get_schedule_class

from config.pipeline import SCHEDULES, bubble, stage_ranks
from tests.config.test_pipeline_rules import section

KINDS = {
    _ComputationType.FORWARD: "forward",
    _ComputationType.FULL_BACKWARD: "backward",
    _ComputationType.BACKWARD_INPUT: "input",
    _ComputationType.BACKWARD_WEIGHT: "weight",
}
SECONDS = {"forward": 1, "input": 1, "weight": 1, "backward": 2}


def order(name: str, ranks: int, n: int, v: int) -> dict[int, list[tuple[int, str, int]]]:
    """(stage, kind, micro-batch) of each rank, in the order of torch's schedule."""
    if name == "1F1B":  # torch runs this one by its own loop, and lists it wrongly
        found = {}
        for rank in range(ranks):
            ahead = ranks - rank
            pairs = [("forward", i) for i in range(ahead)]
            for i in range(n):
                pairs.append(("backward", i))
                if ahead + i < n:
                    pairs.append(("forward", ahead + i))
            found[rank] = [(rank, kind, i) for kind, i in pairs]
        return found
    kind = get_schedule_class(name)
    stages = [
        SimpleNamespace(num_stages=ranks * v, group_size=ranks, group_rank=0, stage_index=0, is_last=False, submod=None)
        for _ in range(v)
    ]
    argument = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    listed = kind(argument, n_microbatches=n, loss_fn=lambda loss, _: loss, scale_grads=False).pipeline_order
    flat = {rank: [a for x in actions if x for a in (x.sub_actions or [x])] for rank, actions in listed.items()}
    return {
        rank: [
            (a.stage_index, KINDS[a.computation_type], a.microbatch_index)
            for a in actions
            if a.computation_type in KINDS
        ]
        for rank, actions in flat.items()
    }


def idle_share(actions: dict[int, list[tuple[int, str, int]]], stages: int) -> float:
    """Run the actions of all ranks as soon as what they need is there; the share of time in which a rank waits."""
    done: dict[tuple[int, bool, int], float] = {}
    clock, busy, waiting = (
        dict.fromkeys(actions, 0.0),
        dict.fromkeys(actions, 0.0),
        {r: list(a) for r, a in actions.items()},
    )
    while any(waiting.values()):
        before = sum(map(len, waiting.values()))
        for rank, queue in waiting.items():
            while queue:
                stage, kind, i = queue[0]
                forward = kind == "forward"
                need = (
                    (stage - 1, True, i)
                    if forward
                    else (stage + 1, False, i)
                    if stage + 1 < stages
                    else (stage, True, i)
                )
                if kind != "weight" and need[0] >= 0 and need not in done:
                    break
                begin = max(clock[rank], 0.0 if kind == "weight" else done.get(need, 0.0))
                clock[rank] = begin + SECONDS[kind]
                busy[rank] += SECONDS[kind]
                if kind != "weight":
                    done[stage, forward, i] = clock[rank]
                queue.pop(0)
        assert sum(map(len, waiting.values())) < before, "the order is a deadlock"
    return 1 - sum(busy.values()) / (len(busy) * max(clock.values()))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "naive"])
def test_the_formula_is_the_idle_time_of_torchs_order(schedule, ranks, rounds):
    n, v = ranks * rounds, SCHEDULES[schedule].stages_per_rank or 2
    actions = order(schedule, ranks, n, v)
    assert idle_share(actions, ranks * v) == pytest.approx(bubble(section(ranks, schedule), 8 * ranks, n))
    owners = {stage: rank for rank, queue in actions.items() for stage, _, _ in queue}
    assert [owners[i] for i in range(ranks * v)] == stage_ranks(section(ranks, schedule), ranks * v)
