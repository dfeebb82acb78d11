"""The folder that holds everything a run leaves behind, and the rules that keep two runs from sharing one.

    config.toml       the resolved configuration; launches again as it is
    run.json          command, origins, difference from the base, corpus, model size, mesh, warnings
    environment.json  machine, versions, settings, commit
    dirty.patch       what the source differed by from that commit, if it did
    tokenizer/        its files, of a run with checkpoints        (data/tokenizer_files.py)
    metrics.jsonl     one object a log step                       (trainer/metrics.py)
    tb/               the same for TensorBoard                    (trainer/metrics.py)
    checkpoint/       stays where it is when the run is continued
    evaluations/      results of tasks on its checkpoints; stays  (evaluation/record.py)
    attempts/<n>/     the files of an earlier attempt that did not finish, moved; its events renamed, or TensorBoard
                      would draw them beside those of the attempt that goes on from them
    DONE | FAILED     how it ended; neither while it runs or after a kill

Each file appears whole or not at all, and config.toml comes last: a folder with a config.toml has the rest. A lock held
by the process, which the kernel drops when it dies, tells a run that is alive from one that was killed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import tomli

from config.errors import ConfigError
from config.keys import shown
from config.load import Resolved, flatten, to_toml
from config.schema import Config, Job
from trainer.attempts import attempts_of, earlier_metrics, move_attempt
from trainer.environment import describe_environment
from trainer.run_lock import LOCK, hold, holder

State = Literal["new", "continued", "done"]

TOKENIZER = "tokenizer"

logger = logging.getLogger(__name__)


class RunDirectory:
    """An open run directory, made by ``open_run_directory``. Files in it belong to this process until ``finish``."""

    def __init__(self, path: Path, state: State, lock: int | None, record: dict[str, Any]):
        self.path = path
        self.state = state
        """ "new"; "continued" after an earlier attempt that did not finish; "done": nothing to do, nothing changed."""
        self.record = record
        """The content of run.json."""
        self._lock = lock

    def add_to_record(self, **fields: Any) -> None:
        """Set fields of run.json that are known only once the run is under way."""
        self.record.update(fields)
        _write_json(self.path / "run.json", self.record)

    def earlier_metrics(self, step: int) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl that attempts before this one wrote up to ``step``, by step."""
        return earlier_metrics(self.path, step)

    def finish(
        self, status: Literal["done", "failed"], *, steps: int, reason: str = "", skipped_steps: int = 0
    ) -> None:
        """Write DONE or FAILED and let go of the directory. Close whatever else writes to it before.

        ``steps`` are those completed, ``skipped_steps`` of them without an update because the loss was not finite.
        """
        ending = {"finished": _now(), "steps": steps, "reason": reason, "skipped_steps": skipped_steps}
        _write_json(self.path / ("DONE" if status == "done" else "FAILED"), ending)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def run_directory_state(resolved: Resolved, *, opener: bool = True) -> State:
    """What ``open_run_directory`` would find. Reads only.

    A rank that will not open the directory itself (``opener`` False) learns whether the run is done and nothing else:
    the one that does may have begun, and reports what is wrong.

    Raises:
        ConfigError: job.run_dir holds another configuration, is in use, or is no run directory; or nothing can be
            written where it, or the folder of a new one, would be.
    """
    job = resolved.config.job
    path = Path(job.run_dir)
    if opener:
        state = _state(path, resolved, ask_lock=True) if job.run_dir else "new"
        if state != "done":
            _check_writable(job)
        return state
    if not job.run_dir:
        return "new"
    if not (path / "DONE").exists():
        return "new"
    recorded = _recorded_configuration(path)
    return "new" if recorded is None or _differences(recorded, resolved) else "done"


def open_run_directory(resolved: Resolved, *, command: list[str], record: dict[str, Any]) -> RunDirectory:
    """Make or take over the run directory and write its record. Called by one process of a run.

    Without job.run_dir that is a new ``<dump_folder>/<file name>/<date>-<time>-<random>``; no two runs get the same
    one.

    Args:
        command: the command line, as a list.
        record: further fields of run.json, as ``json`` takes them.

    Raises:
        ConfigError: as ``run_directory_state``, and when the folder cannot be made. Nothing has been changed then.
    """
    job = resolved.config.job
    path = Path(job.run_dir) if job.run_dir else None
    if path and run_directory_state(resolved) == "done":
        return RunDirectory(path, "done", None, json.loads((path / "run.json").read_bytes()))
    try:
        if path is None:
            path = _new_directory(Path(job.dump_folder) / (Path(job.config_file).stem or "run"))
        path.mkdir(parents=True, exist_ok=True)
        lock = hold(path)
    except OSError as error:
        raise _cannot_be_written(job, error.strerror or str(error)) from None
    try:
        state = _state(path, resolved, ask_lock=False)  # again: another process may have been faster
        if state == "continued":
            earlier = move_attempt(path, resolved.config.checkpoint.folder)
            logger.info("%s: continued; files of the earlier attempt are in %s", path, earlier)
        return RunDirectory(path, state, lock, _write_record(path, resolved, command, record))
    except BaseException:
        if lock is not None:
            os.close(lock)
        raise


def _check_writable(job: Job) -> None:
    """That a folder can be made where the run's would be, without making it."""
    folder = Path(job.run_dir or job.dump_folder)
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir():
        raise _cannot_be_written(job, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.W_OK | os.X_OK):
        raise _cannot_be_written(job, os.strerror(errno.EACCES))


def _cannot_be_written(job: Job, why: str) -> ConfigError:
    key, folder = ("run_dir", job.run_dir) if job.run_dir else ("dump_folder", job.dump_folder)
    return ConfigError(f"job.{key} = {shown(folder)}: cannot be written: {why}. Choose another folder.")


def _new_directory(parent: Path) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        path = parent / f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue


def _state(path: Path, resolved: Resolved, *, ask_lock: bool) -> State:
    where = f"job.run_dir = {shown(str(path))}"
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{where}: is a file. Choose a new folder.")
    names = {p.name for p in path.iterdir()} if path.is_dir() else set()
    recorded = _recorded_configuration(path)
    if recorded is None:
        # A run that was killed while it wrote its record leaves these and nothing worth keeping.
        strangers = sorted(n for n in names - {LOCK, "run.json", "environment.json", "dirty.patch"} if ".tmp" not in n)
        if strangers:
            raise ConfigError(
                f"{where}: is not a run directory and not empty (it holds {strangers[0]}). Choose a new folder."
            )
    elif differing := _differences(recorded, resolved):
        raise ConfigError(
            f"{where}: holds another configuration: {'; '.join(differing)}. Choose another run_dir, or set these back."
        )
    if recorded is not None and "DONE" in names:
        return "done"
    if ask_lock and (process := holder(path)):
        raise ConfigError(f"{where}: is in use by process {process}. Wait for it, or choose another run_dir.")
    return "new" if recorded is None else "continued"


def _recorded_configuration(path: Path) -> dict[str, Any] | None:
    """Full key -> value of config.toml, or of the last attempt's if a kill fell between moving and writing."""
    found = [path / "config.toml", *reversed([attempt / "config.toml" for attempt in attempts_of(path)])]
    for file in found:
        if file.is_file():
            try:
                return _flat(file.read_text(encoding="utf-8"))
            except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file}: cannot be read: {error}. Choose another job.run_dir.") from None
    return None


def _flat(text: str) -> dict[str, Any]:
    return {f"{section}.{key}": v for section, table in tomli.loads(text).items() for key, v in table.items()}


def _differences(recorded: dict[str, Any], resolved: Resolved) -> list[str]:
    """What differs between a recorded and the present configuration, apart from [job], in words.

    A key that the record lacks had its default: it is unset, or younger than the run.
    """
    recorded, present = _flat(to_toml(Config())) | recorded, _flat(to_toml(resolved.config))

    def value(flat: dict[str, Any], key: str) -> str:
        return shown(flat[key]) if key in flat else "unset"

    keys = [key for key in {**present, **recorded} if not key.startswith("job.")]
    return [
        f"{key} = {value(recorded, key)} there, {value(present, key)} now"
        for key in keys
        if recorded.get(key) != present.get(key)
    ]


def _write_record(path: Path, resolved: Resolved, command: list[str], record: dict[str, Any]) -> dict[str, Any]:
    config = resolved.config
    environment, patch = describe_environment(Path(__file__).parents[1], deterministic=config.debug.deterministic)
    ablation = None
    if resolved.arm:
        file = config.job.config_file
        tuned, flat = resolved.ablation.get("tune", {}), flatten(config)
        ablation = {
            "name": Path(file).stem,
            "arm": resolved.arm,
            "file": file,
            "question": resolved.ablation,
            "tune": {key: flat[key] for key in tuned if key in flat},
        }
    run = {
        "schema": 1,
        "command": command,
        "started": _now(),
        "config_file": config.job.config_file,
        "description": config.job.description,
        "origins": resolved.origins,
        "base_diff": {key: list(values) for key, values in resolved.base_diff.items()},
        "ablation": ablation,
        **record,
    }
    _write_json(path / "environment.json", environment)
    (path / "dirty.patch").unlink(missing_ok=True)
    if patch:
        _write(path / "dirty.patch", patch)
    _write_json(path / "run.json", run)
    _write(path / "config.toml", to_toml(config).encode())
    return run


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write_json(path: Path, value: Any) -> None:
    _write(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, also after a kill or a power cut."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
