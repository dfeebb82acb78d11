import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from config.flavors import FLAVORS
from model.initial_weights import draw, initial_value, seed_of

SHAPE = FLAVORS["llama3"]["debug"]
CPU = torch.device("cpu")


def drawn(name: str, size: tuple[int, ...] = (256, 128), seed: int = 0) -> torch.Tensor:
    return draw(name, torch.Size(size), initial_value(name, SHAPE), seed, CPU)


def test_a_tensor_depends_on_seed_and_name_and_not_on_the_global_generator():
    name = "layers.1.attention.wq.weight"
    torch.manual_seed(1)
    first = drawn(name)
    torch.manual_seed(2)
    assert torch.equal(first, drawn(name))
    assert not torch.equal(first, drawn(name, seed=1))
    assert not torch.equal(first, drawn("layers.2.attention.wq.weight"))


def test_seeds_do_not_depend_on_the_process():
    code = "from model.initial_weights import seed_of; print(seed_of(3, 'layers.0.attention.wk.weight'))"
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert int(out.stdout) == seed_of(3, "layers.0.attention.wk.weight")


def test_scales():
    assert abs(drawn("tok_embeddings.weight").std() - 1.0) < 0.02
    assert abs(drawn("layers.0.attention.wq.weight").std() - 0.02) < 5e-4
    assert abs(drawn("layers.3.attention.wo.weight").std() - 0.02 / 8**0.5) < 2e-4
    assert abs(drawn("layers.3.feed_forward.w2.weight").std() - 0.02 / 8**0.5) < 2e-4
    head = drawn("output.weight")
    assert head.abs().max() <= 3 * SHAPE.dim**-0.5
    assert abs(head.std() - SHAPE.dim**-0.5) < 0.05 * SHAPE.dim**-0.5
    assert torch.equal(drawn("layers.0.attention_norm.weight", (128,)), torch.ones(128))


def test_a_tied_embedding_has_the_scale_of_a_head():
    tied = replace(SHAPE, enable_weight_tying=True)
    assert initial_value("tok_embeddings.weight", tied) == initial_value("output.weight", SHAPE)


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(KeyError, match="layers.0.mystery.weight"):
        initial_value("layers.0.mystery.weight", SHAPE)
