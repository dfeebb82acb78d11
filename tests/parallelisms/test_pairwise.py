"""Layout x checkpointing x compile x model x data: a pairwise covering array of what is not refused, in parity.

Rows are complete, legal configurations; which are legal is asked of the rules that a user's configuration meets.
"""

from itertools import combinations, product

import pytest

from config.errors import ConfigError
from config.pipeline import SCHEDULES
from config.rules import check
from config.schema import Config
from config.world import check_world
from tests import covering, parity
from tests.parallelisms.test_parity_data import tiny
from tests.parallelisms.test_parity_moe import MODELS
from tests.parallelisms.test_pipeline_parity import BY_OPERATOR, COMPILED, DDP2, EVERY_2ND, FULL, MASKS, TIED, TP2, pp

# Four layers for the stages of a V; a pipeline's micro-batch is a local batch, or balance losses could not agree.
BASE = {
    "model__n_layers": 4, "model__n_kv_heads": 2, "training__global_batch_size": 16,
    "parallelism__pipeline_parallel_microbatch_size": 2,
}  # fmt: skip
LAYOUTS = {  # name: (ranks, keys)
    "ddp2": (2, DDP2),
    **{f"zero {stage}": (2, {"parallelism__zero_stage": stage}) for stage in (1, 2, 3)},
    "hsdp 2x2": (4, {"parallelism__data_parallel_replicate_degree": 2}),
    "tp2": (2, TP2),
    "fsdp2 x tp2": (4, TP2),
    **{f"pp2 {schedule}": (2, pp(schedule)) for schedule in SCHEDULES},
    "pp2 x fsdp2 1F1B": (4, pp("1F1B")),
}
CHECKPOINTING = {"kept": {}, "full": FULL, "every 2nd block": EVERY_2ND, "by operator": BY_OPERATOR}
COMPILE = {
    "eager": {},
    "model": COMPILED | {"compile__components": ["model"]},
    "loss": COMPILED | {"compile__components": ["loss"]},
    "model and loss": COMPILED | {"compile__components": ["model", "loss"]},
}
KINDS = {
    "dense": {},
    "tied": TIED,
    "experts": {"model__name": "moe", "model__flavor": "debug_moe", "moe__hidden_dim": 16, "moe__num_experts": 4}
    | MODELS["aux loss, z-loss"],
}
DATA = {"plain": {}, "masks": MASKS}
FACTORS = {
    "layout": LAYOUTS, "checkpointing": CHECKPOINTING, "compile": COMPILE, "model": KINDS, "data": DATA,
}  # fmt: skip


def configuration(row: covering.Row) -> tuple[int, Config]:
    """(ranks, configuration) of a row."""
    ranks, layout = LAYOUTS[row["layout"]]
    changes = BASE | layout | CHECKPOINTING[row["checkpointing"]] | COMPILE[row["compile"]]
    return ranks, tiny(**changes | KINDS[row["model"]] | DATA[row["data"]])


def is_legal(row: covering.Row) -> bool:
    ranks, config = configuration(row)
    try:
        check(config, {})
        check_world(config, ranks)
    except ConfigError:
        return False
    return True


ALLOWED = covering.legal_rows({factor: list(values) for factor, values in FACTORS.items()}, is_legal)
ROWS = covering.covering_array(ALLOWED)
QUICK = covering.sample(ROWS, 3, seed=6)


def name(row: covering.Row) -> str:
    return ", ".join(row.values())


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=name(r), marks=[] if r in QUICK else [pytest.mark.slow]) for r in ROWS]
)
def test_a_combination_trains_as_one_process_does(row):
    ranks, candidate = configuration(row)
    reference = tiny(**BASE | KINDS[row["model"]] | DATA[row["data"]])
    parity.check(reference, candidate, world_size=ranks)


def test_every_legal_pair_is_covered_and_no_row_is_refused():
    assert all(map(is_legal, ROWS)) and len(ROWS) < len(ALLOWED) / 5
    covered = [set(row.items()) for row in ROWS]
    possible = [set(row.items()) for row in ALLOWED]
    for a, b in combinations(FACTORS, 2):
        for pair in product(((a, x) for x in FACTORS[a]), ((b, y) for y in FACTORS[b])):
            legal = any(row.issuperset(pair) for row in possible)
            assert legal == any(row.issuperset(pair) for row in covered), pair


def test_what_is_left_out_is_what_the_rules_refuse():
    """A rule that refused too much would empty the array; these are all pairs that no combination can have."""
    possible = [set(row.items()) for row in ALLOWED]
    refused = {
        (x, y)
        for a, b in combinations(FACTORS, 2)
        for x, y in product(FACTORS[a], FACTORS[b])
        if not any(row.issuperset({(a, x), (b, y)}) for row in possible)
    }
    split = [f"pp2 {s}" for s, schedule in SCHEDULES.items() if schedule.splits_backward]
    expected = {(s, c) for s in split for c in CHECKPOINTING if c != "kept"}
    expected |= {(s, c) for s in split for c in ("model", "model and loss")}
    assert refused == expected | {("zero 1", "experts")}


def test_a_free_product_is_covered_by_few_rows():
    factors = {f: [f"{f}{i}" for i in range(3)] for f in "abcd"}
    rows = covering.covering_array(covering.legal_rows(factors, lambda row: True))
    assert set().union(*map(covering.pairs, rows)) == {
        pair for row in covering.legal_rows(factors, lambda row: True) for pair in covering.pairs(row)
    }
    assert 9 <= len(rows) <= 12, "nine is the least there can be"


def test_an_illegal_pair_is_left_out_and_costs_no_other():
    factors = {f: [f"{f}{i}" for i in range(2)] for f in "abc"}
    allowed = covering.legal_rows(factors, lambda row: (row["a"], row["b"]) != ("a0", "b0"))
    found = set().union(*map(covering.pairs, covering.covering_array(allowed)))
    assert (("a", "a0"), ("b", "b0")) not in found and len(found) == 11
