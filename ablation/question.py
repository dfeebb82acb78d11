"""A question: what one file of train_configs/ablations/ asks, before its configurations are resolved.

Reading keeps going after a mistake: ``Question.violations`` holds them all, so that ``check`` can print every one. A
key that could not be read has its default there. Only a file that is no ablation at all raises.

Under ``design = "factorial"`` and ``"ladder"`` each written arm changes one of the declared keys, and the arms that run
are made of them: every combination of arms that change different keys ("a", "b", "a+b"), or their running sum in file
order ("a", "a+b", "a+b+c"). The baseline is the file without any of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from config.errors import ConfigError
from config.keys import checked, did_you_mean, keys_of, shown
from config.schema import Ablation, Decide
from config.toml_file import leaves_of
from config.toml_file import read as read_document

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = ROOT / "train_configs" / "ablations"

# The metrics a decision may rest on; lower is better for each. Throughput stands beside them in every report.
DECISION_METRICS = (
    "validation_metrics/loss",
    "validation_metrics/bits_per_byte",
    "validation_metrics/perplexity",
    "loss_metrics/global_avg_loss",
)
_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=-]*")


@dataclass
class Question:
    """One ablation file. ``arms`` maps each written arm to its full keys and values, in file order.

    ``readable`` says that every key and value is known by itself, so that the arms can be resolved.
    """

    path: Path
    table: Ablation = field(default_factory=Ablation)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    readable: bool = True

    @property
    def name(self) -> str:
        """The file's stem: the name of the question and of its folder of results."""
        return self.path.stem

    @property
    def variables(self) -> list[str]:
        """The declared keys; empty for a question that only asks A/A."""
        variable = self.table.variable
        return variable if isinstance(variable, list) else [variable] if variable else []

    @property
    def aa_seeds(self) -> list[int]:
        """Seeds of the baseline's second set: disjoint from ``seeds`` and as many. Empty without ``aa``."""
        first = max(self.table.seeds, default=0) + 1
        return list(range(first, first + len(self.table.seeds))) if self.table.aa else []


def find(name: str) -> Path:
    """The file of a question given by name (``learning_rate``) or by path.

    Raises:
        ConfigError: there is no such question.
    """
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            guessed = did_you_mean(path.stem, [p.stem for p in all_files()])
            raise ConfigError(f"{name}: no such file{guessed or '; `python -m ablation list` shows the questions'}")
        return path
    named = QUESTIONS / f"{name}.toml"
    if not named.is_file():
        guessed = did_you_mean(name, [p.stem for p in all_files()])
        raise ConfigError(f"{name}: no such question{guessed or '; `python -m ablation list` shows those there are'}")
    return named


def all_files() -> list[Path]:
    """Every question of the checkout, by name."""
    return sorted(QUESTIONS.glob("*.toml"))


def guess(word: str, known: list[str]) -> str:
    """What to add to "no such ...": the nearest known word, else all of them."""
    return did_you_mean(word, known) or f"; there are {', '.join(known) or 'none'}"


def relative(path: Path) -> str:
    """A path as messages show it: relative to the working directory or the checkout where it lies inside one."""
    for root in (Path.cwd(), ROOT):
        if path.resolve().is_relative_to(root):
            return str(path.resolve().relative_to(root))
    return str(path)


def without_path(error: ConfigError, path: Path) -> list[str]:
    """The lines of a message about a file, without the file: whoever prints violations leads each line with it."""
    return [line.removeprefix(f"{path}: ").removeprefix(f"{path} ") for line in str(error).split("\n")]


def read(path: Path) -> Question:
    """Read an ablation file.

    Raises:
        ConfigError: not readable as TOML, or without an [ablation] table.
    """
    question = Question(path)
    try:
        raw = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        read_document(path)  # says what is wrong, with line and column
        raise
    if not isinstance(raw.get("ablation"), dict):
        raise ConfigError(f"{relative(path)}: no [ablation] table; a plain training file, not an ablation")
    try:
        read_document(path)
    except ConfigError as error:
        question.readable = False
        question.violations += without_path(error, path)
    arms = raw.get("arms", {})
    _read_table(question.table, raw["ablation"])
    if isinstance(arms, dict):
        question.arms = {name: leaves_of(table, {}) for name, table in arms.items() if isinstance(table, dict)}
    for complaints in (_about_decision, _about_arms, _about_seeds, _about_variables):
        complaints(question, question.violations.append)
    return question


def _read_table(table: Ablation, raw: dict[str, Any]) -> None:
    """Fill ``table`` with the keys that are right; read_document has complained about the others."""
    known = keys_of(Ablation, "ablation.")
    for name, value in leaves_of(raw, known, "ablation.").items():
        try:
            value = checked(known[name], value)
        except (KeyError, ValueError):
            continue
        owner: Ablation | Decide = table.decide if name.startswith("ablation.decide.") else table
        setattr(owner, name.rpartition(".")[2], value)


Complain = Callable[[str], None]


def _about_decision(question: Question, bad: Complain) -> None:
    metric, runs_on = question.table.decide.metric, question.table.runs_on
    if metric not in DECISION_METRICS:
        bad(f"ablation.decide.metric = {shown(metric)}: unknown metric{guess(metric, list(DECISION_METRICS))}")
    gpus = runs_on.get("gpus", [])
    if runs_on.keys() - {"gpus"} or not isinstance(gpus, list) or any(type(n) is not int or n < 1 for n in gpus):
        bad(f"ablation.runs_on = {shown(runs_on)}: expected {{ gpus = [numbers of processes] }}")
        question.table.runs_on = {}


def _about_arms(question: Question, bad: Complain) -> None:
    table, names = question.table, list(question.arms)
    if re.search(r"-\d+$", question.name):
        bad(f"{question.path.name}: a question's name may not end in -<number>; that marks a second folder of results")
    if not names:
        bad("arms: none; write a table [arms.NAME] for each")
        return
    for name in names:
        if not _ARM_NAME.fullmatch(name):
            bad(f"arms.{shown(name)}: an arm names a folder; use letters, digits and _ . = -")
    for key, given in (("baseline", [table.baseline]), ("references", table.references)):
        for name in given:
            if name not in names:
                bad(f"ablation.{key} = {shown(name)}: no such arm{guess(name, names)}")
    if table.baseline in table.references:
        bad(f"ablation.references: {shown(table.baseline)} is the baseline; a reference is drawn and never ranked")


def _about_seeds(question: Question, bad: Complain) -> None:
    seeds = question.table.seeds
    if any(seed < 0 for seed in seeds):
        bad(f"ablation.seeds = {seeds}: a seed is 0 or more")
    if len(set(seeds)) < len(seeds):
        bad(f"ablation.seeds = {seeds}: a seed is there twice; aa = true is what repeats the baseline")
    elif len(seeds) < 2 and not (question.table.n1_ok and seeds):
        bad(
            f"ablation.seeds = {seeds}: fewer than two seeds give no interval; add seeds, or set n1_ok = true to have "
            "every figure marked n = 1"
        )


def _about_variables(question: Question, bad: Complain) -> None:
    variables, design = question.variables, question.table.design
    if not variables and not (len(question.arms) == 1 and question.table.aa):
        bad("ablation.variable: unset; name the key the arms differ in (only one arm with aa = true needs none)")
    if variables and len(question.arms) == 1:
        bad("arms: one arm cannot show a variable's effect; add arms, or drop ablation.variable and set aa = true")
    if len(set(variables)) < len(variables):
        bad(f"ablation.variable = {shown(variables)}: a key is there twice")
    elif len(variables) > 1 and not design:
        bad(
            f"ablation.variable = {shown(variables)}: {len(variables)} keys, an ablation changes one; set design = "
            '"factorial" or "ladder", or drop a key'
        )
    if design and len(variables) < 2:
        bad(f"ablation.design = {shown(design)}: needs two or more keys in ablation.variable")
    if design and question.arms.get(question.table.baseline):
        bad(f"arms.{question.table.baseline}: the baseline of a {design} is empty; write its values in the file itself")
