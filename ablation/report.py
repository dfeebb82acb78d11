"""Writes a report directory: report.html, report.md, report.json, PNGs, and verdicts for TensorBoard's text tab."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ablation.document import Table
from ablation.drawings import CSS_NAMES, colours
from ablation.figures import Figure, draw_all
from ablation.report_content import content
from ablation.report_html import render_html
from ablation.report_markdown import render_markdown
from ablation.wording import decision_line, verdict_line

NO_FIGURES = "No figures: matplotlib is not installed (pip install matplotlib, the report extra)."


def write_report(result: dict[str, Any], folder: Path) -> list[str]:
    """Write or replace a report. Of what is in ``folder`` only files that an earlier report lists as its own are
    removed.

    Returns notes for the user, such as a missing matplotlib.
    """
    result = result | {"lines": [verdict_line(result, i) for i in range(len(result["comparisons"]))]}
    folder.mkdir(parents=True, exist_ok=True)
    notes = []
    figures: dict[str, Figure] = {}
    try:
        figures = draw_all(result)
    except ImportError:
        notes.append(NO_FIGURES)
    blocks = content(result, set(figures), notes[0] if notes else "")
    marks = {label: f"var(--{CSS_NAMES[colour]})" for label, colour in colours(result).items()}
    page = render_html(result["name"], blocks, {name: f.svg for name, f in figures.items()}, marks)
    files: dict[str, bytes] = {
        "report.md": render_markdown(blocks).encode(),
        "report.html": page.encode(),
        **{f"{name}.png": figure.png for name, figure in figures.items()},
    }
    changes = next((block for block in blocks if isinstance(block, Table) and "key" in block.columns), None)
    texts = {"verdict": "\n\n".join([*result["lines"], decision_line(result).text])}
    if changes:
        texts["config_diff"] = render_markdown([changes])
    _remove_own(folder)
    events = _tensorboard_event(texts)
    if events:
        files[f"tb/events.out.tfevents.{int(time.time())}.report"] = events
    else:
        notes.append("No TensorBoard text: tensorboard is not installed.")
    files["report.json"] = json.dumps(
        result | {"files": sorted([*files, "report.json"])}, indent=1, allow_nan=False
    ).encode()
    for name, data in files.items():
        _write(folder / name, data)
    return notes


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def _remove_own(folder: Path) -> None:
    try:
        names = json.loads((folder / "report.json").read_text()).get("files", [])
    except (OSError, ValueError, AttributeError):
        return
    for name in names:
        path = folder / name
        if path.resolve().is_relative_to(folder.resolve()):
            path.unlink(missing_ok=True)


def _tensorboard_event(texts: dict[str, str]) -> bytes | None:
    """An event file's bytes with one text a tag; None without tensorboard."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:
        return None
    import io

    now = time.time()
    values = [
        Summary.Value(
            tag=f"report/{name}",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        for name, text in texts.items()
    ]
    stream = io.BytesIO()
    writer = RecordWriter(stream)
    for event in (
        Event(wall_time=now, file_version="brain.Event:2"),
        Event(wall_time=now, summary=Summary(value=values)),
    ):
        writer.write(event.SerializeToString())
    return stream.getvalue()
