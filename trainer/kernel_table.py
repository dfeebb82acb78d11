"""Which kernels (without a GPU: operators) the time of a profiled window went to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.trace import KINDS, Window

SHOWN = 40
"""Rows of the text; kernels.json has all."""
_NAME_WIDTH = 110


@dataclass(frozen=True)
class Row:
    """All calls of one kernel that are of one kind."""

    name: str
    kind: str
    calls: int
    total_us: float
    """Time of all calls; without a GPU, without that of operators inside."""


@dataclass(frozen=True)
class KernelTable:
    """Rows by falling time."""

    device: str
    steps: int
    rows: list[Row]

    @property
    def total_us(self) -> float:
        """Time of all rows. Streams add up, so it may exceed the window's length."""
        return sum(row.total_us for row in self.rows)

    def kinds(self) -> list[Row]:
        """One row a kind (name and kind are the same), by falling time."""
        of = {kind: [row for row in self.rows if row.kind == kind] for kind in KINDS}
        sums = [Row(k, k, sum(r.calls for r in rows), sum(r.total_us for r in rows)) for k, rows in of.items() if rows]
        return sorted(sums, key=lambda row: -row.total_us)

    def record(self) -> dict[str, Any]:
        """The content of kernels.json."""
        return {
            "device": self.device,
            "steps": self.steps,
            "total_us": self.total_us,
            "kinds": [self._fields(row, "kind") for row in self.kinds()],
            "kernels": [self._fields(row, "name", "kind") for row in self.rows],
        }

    def _fields(self, row: Row, *words: str) -> dict[str, Any]:
        named = {word: getattr(row, word) for word in words}
        return {**named, "calls": row.calls, "total_us": row.total_us, "share": self._share(row)}

    def _share(self, row: Row) -> float:
        return row.total_us / self.total_us if self.total_us else 0.0

    def render(self) -> str:
        """The kinds and the first ``SHOWN`` rows, to read."""
        what = "kernels on the device" if self.device == "cuda" else "operators of the main thread, and gloo"
        lines = [f"{what}: {self.total_us / 1e3 / self.steps:.2f} ms a step, {self.steps} profiled steps", ""]
        header = f"{'ms a step':>10} {'share':>7} {'calls a step':>13}  "
        lines += [header + "kind", *(self._line(row, row.kind) for row in self.kinds()), ""]
        lines += [header + f"{'us a call':>10}  {'kind':<14} name"]
        for row in self.rows[:SHOWN]:
            name = row.name if len(row.name) <= _NAME_WIDTH else row.name[: _NAME_WIDTH - 3] + "..."
            lines.append(self._line(row, f"{row.total_us / row.calls:>10.1f}  {row.kind:<14} {name}"))
        if len(self.rows) > SHOWN:
            lines.append(f"and {len(self.rows) - SHOWN} more in the .json file")
        return "\n".join(lines) + "\n"

    def _line(self, row: Row, words: str) -> str:
        milliseconds, calls = row.total_us / 1e3 / self.steps, row.calls / self.steps
        return f"{milliseconds:>10.3f} {100 * self._share(row):>5.1f} % {calls:>13.1f}  {words}"


def tabulate(window: Window, steps: int) -> KernelTable:
    """The table of ``window``, which holds ``steps`` steps."""
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for a in window.activities:
        calls, total = sums.get((a.name, a.kind), (0, 0.0))
        sums[a.name, a.kind] = calls + 1, total + a.own
    rows = [Row(name, kind, calls, total) for (name, kind), (calls, total) in sums.items()]
    return KernelTable(window.device, steps, sorted(rows, key=lambda row: -row.total_us))
