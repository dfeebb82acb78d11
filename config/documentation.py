"""docs/configuration.md, generated from the schema so that it cannot fall behind; a test compares the two."""

from __future__ import annotations

from pathlib import Path

from config.arithmetic import parameter_counts
from config.flavors import FLAVORS
from config.keys import Key, all_keys, expected, help_lines, keys_of, shown
from config.schema import Ablation
from config.torchtitan_keys import FOLLOWS, REFUSED, TRANSLATED
from config.world import DEGREES

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m config docs` from config/. Edit there; a test compares. -->

A run is described by TOML files and the command line. Section and key names are torchtitan 0.2.2's wherever the meaning
is the same.

```toml
base = "llama_debug.toml"       # or a list; relative to this file

[training]
steps = 200
```

```
python train.py --job.config_file my.toml --training.steps 50 --compile.enable
```

* **Order**, later wins: defaults, then each base from left to right, then the file, then the arm of an ablation, then
  the command line.
* **Nothing is ignored.** An unknown key, a wrong type, a value out of range or two keys that contradict each other stop
  the run before anything is touched, with one message and exit code 2. A typed key that has no effect is named.
* **Every value has an origin.** `python -m config show FILE` prints each value with the file, arm, command line or rule
  it came from; the text is itself a TOML file. `python -m config diff A B` lists what differs, also between arms
  (`file.toml:arm`). `--job.dry_run` adds parameters, FLOPs a token, tokens a step and memory.
* **Command line**: `--section.key value` or `--section.key=value`. Switches: `--compile.enable`,
  `--compile.enable false`, `--no-compile.enable`. Lists: `--compile.components model loss` or `model,loss`; an empty
  list is `"[]"`. Of a key given twice the last counts. `--help` lists every key.
* **Companions**: a key marked *with* another one matters only while that one has the value named; an ablation of the
  parent may change it too.
* Paths in a file are relative to the folder that training is started in; only `base` is relative to the file.
"""

_ABLATIONS = """\
## Ablation files

A file with `[ablation]` and `[arms.NAME]` tables holds one configuration an arm. It is started with
`--ablation.arm NAME`; `NAME+OTHER` lays both arms over each other. An ablation cannot be the base of another file.

```toml
base = "llama_debug.toml"

[ablation]
question = "Which peak learning rate?"
variable = "optimizer.lr"
baseline = "low"
seeds    = [1, 2, 3]

[arms.low]
optimizer.lr = 8e-4

[arms.high]
optimizer.lr = 2e-3
```
"""

_TORCHTITAN = """\
## Files of torchtitan 0.2.2

They load as they are, if they ask for nothing that is missing here. Defaults that differ:
`activation_checkpoint.mode` is "none" here and "selective" there, `metrics.enable_tensorboard` true and false,
`model.hf_assets_path` empty and "./tests/assets/tokenizer", `debug.seed` 0 and unset. Keys that only torchtitan has:

Translated:
"""


def render_docs() -> str:
    """The whole text of docs/configuration.md."""
    out = [_INTRODUCTION, _world_text()]
    table = all_keys()
    for section in dict.fromkeys(full.partition(".")[0] for full in table):
        out += [f"## [{section}]", "", *_rows([k for k in table.values() if k.name.startswith(f"{section}.")])]
    out += [_ABLATIONS, *_rows(list(keys_of(Ablation, "ablation.").values())), *_flavors(), *_torchtitan()]
    return "\n".join(out)


def _world_text() -> str:
    axes = " x ".join(f"`{key}`" for key in DEGREES.values())
    return (
        f"The number of ranks is {axes}.\n`global_batch_size` is split over the data-parallel ranks and, where it is"
        " larger than `local_batch_size` x their\nnumber, over several micro-batches a step (gradient accumulation).\n"
    )


def _rows(keys: list[Key]) -> list[str]:
    lines = help_lines()
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for k in keys:
        section, _, name = k.name.partition(".")
        bounds = [f"at least {k.minimum:g}"] if k.minimum is not None else []
        bounds += [f"at most {k.maximum:g}"] if k.maximum is not None else []
        kind = ", ".join([expected(k.type), *bounds])
        condition = f" *With {k.parent} = {' or '.join(shown(v) for v in k.parent_values)}.*" if k.parent else ""
        rows.append(f"| `{name}` | {_cell(kind)} | {_default(k)} | {_cell(lines[k.name])}{condition} |")
    return [*rows, ""]


def _default(k: Key) -> str:
    return "unset" if k.default is None else f"`{shown(k.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def _flavors() -> list[str]:
    intro = "`model.name` and `model.flavor` name a shape; other keys of `[model]` change single fields of it."
    rows = ["## Flavors", "", intro, ""]
    rows += [
        "| name | flavor | parameters | active | layers | dim | heads / kv | hidden | vocabulary | tied | max_seq_len |"
    ]
    rows += ["|---|---|--:|--:|--:|--:|--:|--:|--:|---|--:|"]
    for name, family in FLAVORS.items():
        for flavor, s in family.items():
            cells = [
                name,
                f"`{flavor}`",
                f"{parameter_counts(s).total:,}",
                f"{parameter_counts(s).active:,}",
                f"{s.n_layers}",
                f"{s.dim:,}",
                f"{s.n_heads} / {s.n_kv_heads}",
                f"{s.hidden_dim:,}",
                f"{s.vocab_size:,}",
                "yes" if s.enable_weight_tying else "no",
                f"{s.max_seq_len:,}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return [*rows, ""]


def _torchtitan() -> list[str]:
    rows = [_TORCHTITAN, "| torchtitan's key | means |", "|---|---|"]
    rows += [f"| `{full}` | {meaning} |" for full, meaning in TRANSLATED.items()]
    rows += ["", "Read with the values that change nothing here (a note names them), refused with any other:", ""]
    rows += ["| torchtitan's key | changes nothing | any other value |", "|---|---|---|"]
    for full, (harmless, reason) in REFUSED.items():
        values = " or ".join(f"`{shown(v)}`" for v in harmless) or "while validation is off"
        rows.append(f"| `{full}` | {values} | {_cell(reason)} |")
    rows += ["", "Read with any value while the key they belong to changes nothing:", ""]
    rows += ["| torchtitan's keys | belong to |", "|---|---|"]
    for parent in dict.fromkeys(FOLLOWS.values()):
        rows.append(f"| {', '.join(f'`{k}`' for k, p in FOLLOWS.items() if p == parent)} | `{parent}` |")
    return [*rows, ""]
