"""Groups by weight decay, implementations against the formula, and fused updates of sharded parameters."""

import logging

import pytest
import torch
from torch import nn

from config.schema import Optimizer
from tests import ranks
from trainer.optimizer import build_optimizer, kind_of


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(8, 4)
        self.attention_norm = nn.RMSNorm(4)
        self.wq = nn.Linear(4, 4, bias=True)
        self.scale = nn.Parameter(torch.ones(4))  # one-dimensional, and no norm
        self.output = nn.Linear(4, 8, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.wq(self.attention_norm(self.tok_embeddings(tokens))) * self.scale)


def undecayed(model: nn.Module, skip: list[str]) -> set[str]:
    optimizer = build_optimizer(model.named_parameters(), Optimizer(weight_decay_skip=skip, weight_decay=0.1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [(group["weight_decay"], {names[id(p)] for p in group["params"]}) for group in optimizer.param_groups]
    assert sum(len(members) for _, members in groups) == len(names)  # each parameter once
    assert {decay for decay, _ in groups} <= {0.0, 0.1}
    return set().union(*(members for decay, members in groups if decay == 0.0))


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ([], set()),
        (["norm"], {"attention_norm.weight"}),
        (["bias"], {"wq.bias"}),
        (["embedding"], {"tok_embeddings.weight"}),
        (["norm", "bias", "embedding"], {"attention_norm.weight", "wq.bias", "tok_embeddings.weight"}),
    ],
)
def test_kinds_left_out_of_weight_decay(skip: list[str], expected: set[str]) -> None:
    assert undecayed(Model(), skip) == expected


def test_tied_head_follows_the_embedding() -> None:
    model = Model(tied=True)
    assert undecayed(model, ["embedding"]) == {"tok_embeddings.weight"}
    both_names = list(model.named_parameters(remove_duplicate=False))
    assert len(both_names) == len(list(model.named_parameters())) + 1
    for order in (both_names, both_names[::-1]):
        optimizer = build_optimizer(order, Optimizer(weight_decay_skip=["embedding"]))
        (group,) = [g for g in optimizer.param_groups if g["weight_decay"] == 0.0]
        assert [p is model.output.weight for p in group["params"]] == [True]


def test_wrapped_names_keep_their_kind() -> None:
    one, two = torch.zeros(4), torch.zeros(4, 4)
    assert kind_of("layers.0._checkpoint_wrapped_module.ffn_norm.weight", one) == "norm"
    assert kind_of("layers.0._orig_mod.attention.q_norm.weight", one) == "norm"
    assert kind_of("norm.weight", one) == "norm"
    assert kind_of("layers.0.attention_norm_proj.weight", two) == "weight"
    assert kind_of("layers.0.moe.expert_bias", one) == "bias"


def test_frozen_parameters_are_left_out() -> None:
    model = Model()
    model.scale.requires_grad_(False)
    optimizer = build_optimizer(model.named_parameters(), Optimizer())
    assert all(p is not model.scale for group in optimizer.param_groups for p in group["params"])


IMPLEMENTATIONS = ("for-loop", "foreach", "fused")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_two_adamw_steps_by_hand(implementation: str) -> None:
    weight = nn.Parameter(torch.tensor([[2.0]]))
    section = Optimizer(lr=0.1, beta1=0.9, beta2=0.95, eps=0.1, weight_decay=0.5, implementation=implementation)
    optimizer = build_optimizer([("w.weight", weight)], section)
    value, m, v = 2.0, 0.0, 0.0
    for step, gradient in enumerate((1.0, -3.0), 1):
        weight.grad = torch.tensor([[gradient]])
        optimizer.step()
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        value -= 0.1 * 0.5 * value
        value -= 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)) ** 0.5 + 0.1)
        assert weight.item() == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sgd_is_plain(implementation: str) -> None:
    weight = nn.Parameter(torch.tensor([[2.0]]))
    section = Optimizer(name="SGD", lr=0.1, weight_decay=0.0, implementation=implementation)
    optimizer = build_optimizer([("w.weight", weight)], section)
    for _ in range(3):  # with momentum the third step would be larger
        weight.grad = torch.tensor([[1.0]])
        optimizer.step()
    assert weight.item() == pytest.approx(1.7)


def test_adam_adds_decay_to_the_gradient() -> None:
    weight = nn.Parameter(torch.tensor([[2.0]]))
    optimizer = build_optimizer([("w.weight", weight)], Optimizer(name="Adam", lr=0.1, weight_decay=0.5))
    weight.grad = torch.tensor([[-1.0]])  # -1 + 0.5 * 2 = 0: Adam stands still, AdamW would not
    optimizer.step()
    assert weight.item() == pytest.approx(2.0)


def test_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build_optimizer(Model().named_parameters(), Optimizer(weight_decay_skip=["norm", "bias"]))
    assert [r.getMessage() for r in caplog.records] == [
        "Applied AdamW (fused): lr 0.0008, weight decay 0.1 on 84 parameters, none on 8"
    ]


def _train(name: str, implementation: str, sharded: bool) -> list[torch.Tensor]:
    """Three steps; with ``sharded`` all but the norm are split over the ranks, the norm stays plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(0)
    model = Model()
    if sharded:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        fully_shard(model, mesh=mesh, ignored_params={model.attention_norm.weight})
    section = Optimizer(name=name, lr=0.05, implementation=implementation)
    optimizer = build_optimizer(model.named_parameters(), section)
    for step in range(3):
        model(torch.arange(8).roll(step).reshape(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sharded_and_plain_parameters_together(name: str, implementation: str) -> None:
    expected = _train(name, implementation, False)
    for result in ranks.run(2, _train, name, implementation, True):
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
