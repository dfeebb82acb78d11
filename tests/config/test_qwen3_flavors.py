import pytest
import torch

from config.arithmetic import parameter_counts
from config.flavors import FLAVORS
from model.attention import attention_backend
from model.decoder import Decoder

# Parameters of the published checkpoints, a tied head counted once.
PUBLISHED = {
    "0.6B": 596_049_920,
    "1.7B": 1_720_574_976,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "14B": 14_768_307_200,
    "32B": 32_762_123_264,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones_and_those_of_the_module(name):
    shape = FLAVORS["qwen3"][name]
    with torch.device("meta"):
        model = Decoder(shape, attention_backend("sdpa"), 16)
    assert parameter_counts(shape).total == PUBLISHED[name] == sum(p.numel() for p in model.parameters())


def test_every_flavor_has_a_published_count():
    assert FLAVORS["qwen3"].keys() == PUBLISHED.keys()
