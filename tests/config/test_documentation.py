"""docs/configuration.md is what the schema says."""

from config.documentation import TARGET, render_docs
from config.keys import all_keys, help_lines, keys_of
from config.schema import Ablation


def test_the_page_is_current():
    assert TARGET.read_text(encoding="utf-8") == render_docs(), "run: python -m config docs"


def test_every_key_has_a_line_of_help():
    for full in [*all_keys(), *keys_of(Ablation, "ablation.")]:
        assert help_lines()[full].endswith((".", ">", "]")), full
