"""The shapes that are compared, and the settings each side tries on them unless told otherwise.

A setting is a micro-batch and words: ``4+full`` is four sequences a GPU at once with full activation checkpointing. A
list of them is tried from the left; side_<name>.py says which words a side knows (``words``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

WARM_UP = 5
"""Steps left out on every side: they compile, allocate and connect."""


@dataclass(frozen=True)
class Workload:
    """One shape, with equal tokens an optimizer step on every side."""

    name: str
    config: str
    """Our TOML, relative to the checkout: shape, sequence length, data, optimizer and schedule of every side."""
    sequences: int
    """Of an optimizer step, a GPU. A micro-batch divides it; what is left is gradient accumulation."""
    torchtitan: tuple[str, str] | None
    """Its model and flavor (benchmarks/torchtitan_peer.py adds the flavor where it has none); None: not compared."""
    settings: dict[str, str] = field(default_factory=dict)
    """Side -> comma-separated settings. The side "arm" is our own trainer under another setting."""
    warm_up: int = WARM_UP
    """Steps of a run before the timed ones."""


WORKLOADS = {
    w.name: w
    for w in [
        Workload(
            "dense_1b",
            "benchmarks/configs/dense_1b.toml",
            sequences=4,
            torchtitan=("llama3", "1B_untied"),
            settings={"ours": "4", "torchtitan": "4", "transformers": "4+compile,4,2,2+full"},
        ),
        Workload(
            "dense_8b",
            "benchmarks/configs/dense_8b.toml",
            sequences=2,
            torchtitan=("llama3", "8B"),
            settings={"ours": "2,1,1+full", "torchtitan": "2,1,1+full", "transformers": "2+full,1+full"},
        ),
        Workload(
            "moe_7b",
            "benchmarks/configs/moe_7b.toml",
            sequences=8,
            torchtitan=("qwen3", "moe_7b_a1b"),
            settings={"ours": "8,4,2,1", "torchtitan": "8,4,2", "transformers": "4,8+full,4+full,2+full"},
        ),
        Workload(
            "dense_8b_float8",
            "benchmarks/configs/dense_8b.toml",
            sequences=2,
            torchtitan=("llama3", "8B"),
            settings={"ours": "2+float8,1+float8", "torchtitan": "2+float8,1+float8"},
        ),
        Workload(
            "moe_7b_ep2",
            "benchmarks/configs/moe_7b.toml",
            sequences=8,
            torchtitan=("qwen3", "moe_7b_a1b"),
            settings={"ours": "8+ep2,4+ep2", "torchtitan": "8+ep2,4+ep2", "arm": "8,4"},
        ),
        Workload(
            "moe_7b_learned",
            "benchmarks/configs/moe_7b.toml",
            sequences=8,
            torchtitan=None,
            settings={"ours": "8,4", "arm": "8+uniform,4+uniform"},
            warm_up=100,
        ),
        Workload(
            "moe_7b_skewed",
            "benchmarks/configs/moe_7b.toml",
            sequences=8,
            torchtitan=None,
            settings={"ours": "8+skew,4+skew", "arm": "8+uniform,4+uniform"},
        ),
        Workload(
            "moe_7b_float8",
            "benchmarks/configs/moe_7b.toml",
            sequences=8,
            torchtitan=None,
            settings={"ours": "8+float8_experts,4+float8_experts", "arm": "8,4"},
        ),
        Workload(
            "debug",
            "benchmarks/configs/debug.toml",
            sequences=4,
            torchtitan=None,
            settings={"ours": "4", "transformers": "4"},
        ),
        Workload(
            "debug_moe",
            "benchmarks/configs/debug_moe.toml",
            sequences=4,
            torchtitan=None,
            settings={"ours": "4", "transformers": "4", "arm": "4+uniform"},
        ),
    ]
}

TABLE = (
    "moe_7b", "dense_8b", "moe_7b_ep2", "dense_1b", "dense_8b_float8",
    "moe_7b_learned", "moe_7b_skewed", "moe_7b_float8",
)  # fmt: skip
"""What ``--all`` measures; the others are for tests."""
