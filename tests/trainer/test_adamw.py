"""AdamW of our own: torch's to the bit in float32, half the memory in bfloat16, rounding that is right on average."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from config.schema import Optimizer
from tests import ranks
from tests.trainer.test_checkpoint import configuration
from tests.trainer.test_checkpoint import run as run_from_checkpoint
from trainer.adamw import EAGER_ELEMENTS, MOMENTS, AdamW, update
from trainer.optimizer import build_optimizer
from trainer.rounding import random_bits, rounding_key, stochastic_bfloat16

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
LOW = {"state_dtype": torch.bfloat16, "stochastic_rounding": True}


def trained(make, *, device: str = "cpu", seed: int = 3, steps: int = 5):
    """Parameters and optimizer after some steps with gradients drawn from ``seed`` and a rate that moves."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((7, 5), (33,), (16, 16))
    parameters = [torch.nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in sizes]
    optimizer = make([{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}])
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
def test_float32_moments_give_torchs_bits(implementation):
    theirs, _ = trained(lambda groups: torch.optim.AdamW(groups, foreach=implementation == "foreach", **OPTIONS))
    ours, _ = trained(lambda groups: AdamW(groups, **OPTIONS))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_float32_moments_are_close_to_the_fused_update():
    theirs, _ = trained(lambda groups: torch.optim.AdamW(groups, fused=True, **OPTIONS))
    ours, _ = trained(lambda groups: AdamW(groups, **OPTIONS))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stochastic", [False, True])
def test_bfloat16_moments_halve_the_states_and_change_the_update_a_little(stochastic):
    exact, _ = trained(lambda groups: AdamW(groups, **OPTIONS))
    low, optimizer = trained(lambda groups: AdamW(groups, **LOW | OPTIONS | {"stochastic_rounding": stochastic}))
    assert {optimizer.state[p][name].dtype for p in low for name in MOMENTS} == {torch.bfloat16}
    for a, b in zip(low, exact, strict=True):
        assert a.dtype == torch.float32 and not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)  # a hundredth of what five steps move


def test_bfloat16_moments_are_those_written_out():
    """The textbook's update in float64 of moments that are rounded after each step: nearest, a step like any other."""
    generator, options = torch.Generator().manual_seed(8), {**OPTIONS, "weight_decay": 0.1}
    parameter = torch.nn.Parameter(torch.randn(4096, generator=generator))
    optimizer = AdamW([parameter], state_dtype=torch.bfloat16, **options)
    value, mean, square = parameter.detach().double(), *torch.zeros(2, 4096, dtype=torch.float64)
    for step in range(1, 6):
        parameter.grad = torch.randn(4096, generator=generator)
        grad = parameter.grad.double()
        mean, square = 0.9 * mean + 0.1 * grad, 0.95 * square + 0.05 * grad**2
        root = (square / (1 - 0.95**step)).sqrt() + 1e-8
        value = value * (1 - 1e-2 * 0.1) - 1e-2 * mean / (1 - 0.9**step) / root
        mean, square = mean.bfloat16().double(), square.bfloat16().double()
        optimizer.step()
    state = optimizer.state[parameter]
    for found, expected in ((state["exp_avg"], mean), (state["exp_avg_sq"], square)):
        assert (found.double() != expected).float().mean() < 1e-2, "but for ties that float32 and float64 break apart"
    assert float((parameter - value).detach().abs().median()) < 1e-6


def test_rounding_depends_on_its_seed_alone():
    first, second, other = (
        trained(lambda groups, seed=seed: AdamW(groups, seed=seed, **LOW, **OPTIONS))[0] for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_pieces_of_a_large_parameter_round_as_the_whole(monkeypatch):
    whole, _ = trained(lambda groups: AdamW(groups, **LOW, **OPTIONS))
    assert EAGER_ELEMENTS > 256
    monkeypatch.setattr("trainer.adamw.EAGER_ELEMENTS", 10)
    pieces, _ = trained(lambda groups: AdamW(groups, **LOW, **OPTIONS))
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_stochastic_rounding_is_right_on_average_and_leaves_what_fits():
    x = torch.tensor([1.0 + 2**-9, -3.1415926, 1e-30, 0.0, 2.0**-8]).repeat(40_000, 1)
    bits = random_bits(torch.tensor(rounding_key(7)), 0, x.view(-1)).view(x.shape)
    rounded = stochastic_bfloat16(x, bits)
    spacing = x[0].abs().log2().floor().exp2() * 2**-7
    mean_error = (rounded.double().mean(0) - x[0].double()).abs()
    assert (mean_error[:3] < 4 * spacing[:3] / 40_000**0.5).all()
    assert (rounded[:, 3:].float() == x[:, 3:]).all() and rounded[:, 0].unique().tolist() == [1.0, 1.0078125]
    odd = torch.tensor([float("inf"), float("-inf"), float("nan")])
    kept = stochastic_bfloat16(odd, torch.full((3,), 0xFFFF))
    assert kept[:2].tolist() == [float("inf"), float("-inf")] and kept[2].isnan()


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_small_change_is_lost_by_nearest_rounding_alone(stochastic):
    """A second moment with beta2 = 0.999 and no gradient falls by a thousandth a step, a quarter of bfloat16's unit."""
    square = torch.ones(512, dtype=torch.bfloat16)
    zeros, one = torch.zeros(512), torch.tensor(1.0)
    for step in range(200):
        key = torch.tensor(rounding_key(step))
        update(zeros, zeros, zeros.bfloat16(), square, one, one, one, key, 0, 0.9, 0.999, 1e-8, stochastic)
    expected = 0.999**200 if stochastic else 1.0
    assert square.float().mean().item() == pytest.approx(expected, rel=1e-2)


def test_moments_parameters_and_steps_are_rounded_by_chances_of_their_own():
    keys: list[int] = []

    def make(groups):
        optimizer = AdamW(groups, **LOW, **OPTIONS)
        optimizer._update = lambda *arguments: keys.append(int(arguments[7]))
        return optimizer

    trained(make)
    assert len(keys) == len(set(keys)) == 3 * 5
    mean, square = torch.ones(512, dtype=torch.bfloat16), torch.ones(512, dtype=torch.bfloat16)
    zeros, one = torch.zeros(512), torch.tensor(1.0)
    update(zeros, zeros, mean, square, one, one, one, torch.tensor(keys[0]), 0, 0.999, 0.999, 1e-8, True)
    assert 0.2 < (mean != square).float().mean() < 0.6  # a quarter of each goes down


def test_a_compiled_update_is_compiled_once_for_all_sizes_and_steps():
    torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    eager, _ = trained(lambda groups: AdamW(groups, **LOW, **OPTIONS))
    compiled, _ = trained(lambda groups: AdamW(groups, backend="aot_eager", **LOW, **OPTIONS))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    assert graphs["unique_graphs"] == before + 1
    torch._dynamo.reset()


def test_states_survive_a_state_dict_in_their_dtype():
    parameters, optimizer = trained(lambda groups: AdamW(groups, **LOW, **OPTIONS))
    copied = copy.deepcopy(optimizer.state_dict())
    again = AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], **LOW, **OPTIONS)
    again.load_state_dict(copied)
    for parameter in parameters:
        for name in MOMENTS:
            assert torch.equal(again.state[parameter][name], optimizer.state[parameter][name])
            assert again.state[parameter][name].dtype == torch.bfloat16


def test_a_section_chooses_it():
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert type(build_optimizer([("w", parameter)], Optimizer())) is torch.optim.AdamW
    low = build_optimizer([("w", parameter)], Optimizer(state_dtype="bfloat16", stochastic_rounding=True), seed=4)
    assert low.options == {**LOW, "seed": 4, "backend": None}
    assert build_optimizer([("w", parameter)], Optimizer(stochastic_rounding=True), backend="eager").options == {
        "state_dtype": torch.float32, "stochastic_rounding": False, "seed": 0, "backend": "eager",
    }  # fmt: skip


def copies_and_shards() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two ranks: a replicated parameter here, and this rank's and the whole of a sharded one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(48.0).view(6, 8) / 7
    held = [torch.nn.Parameter(distribute_tensor(whole, mesh, [kind])) for kind in (Replicate(), Shard(0))]
    optimizer = AdamW([{"params": [p]} for p in held], **LOW, **OPTIONS)
    for _ in range(3):
        for parameter in held:
            parameter.grad = distribute_tensor(whole.sin(), mesh, parameter.placements)
        optimizer.step()
    states = [optimizer.state[p]["exp_avg"] for p in held]
    assert all(isinstance(s, DTensor) and s.dtype == torch.bfloat16 for s in states)
    return states[0].to_local(), states[1].to_local(), held[0].to_local().detach()


def test_copies_round_alike_and_shards_do_not():
    first, second = ranks.run(2, copies_and_shards)
    assert torch.equal(first[0], second[0]) and torch.equal(first[2], second[2])
    assert first[1].shape == (3, 8) and not torch.equal(first[1], first[0][:3])


@pytest.mark.parametrize("size", [1, 2], ids=["one process", "fsdp"])
def test_a_continued_run_is_bit_identical(size, tmp_path):
    config = configuration(optimizer__state_dtype="bfloat16", optimizer__stochastic_rounding=True)
    straight = ranks.run(size, run_from_checkpoint, config, tmp_path / "straight", 8)
    ranks.run(size, run_from_checkpoint, config, tmp_path / "parts", 4)
    second = ranks.run(size, run_from_checkpoint, config, tmp_path / "parts", 8)
    for whole, after in zip(straight, second, strict=True):
        assert after["from"] == 4 and after["losses"] == whole["losses"][4:]
        assert after["weights"] == whole["weights"] and after["states"] == whole["states"]


def test_a_run_goes_on_with_moments_of_the_other_dtype(tmp_path):
    wide, low = configuration(), configuration(optimizer__state_dtype="bfloat16")
    straight = ranks.run(1, run_from_checkpoint, wide, tmp_path / "straight", 8)[0]
    ranks.run(1, run_from_checkpoint, wide, tmp_path / "parts", 4)
    after = ranks.run(1, run_from_checkpoint, low, tmp_path / "parts", 6)[0]
    assert after["from"] == 4
    for (_, loss, *_), (_, expected, *_) in zip(after["losses"], straight["losses"][4:6], strict=True):
        assert loss == pytest.approx(expected, abs=5e-3)
    assert after["states"] != straight["states"]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, LOW], ids=["float32", "bfloat16, stochastic"])
def test_a_gpu_rounds_as_a_cpu_and_compiles_to_the_same(options):
    torch._dynamo.reset()
    expected, _ = trained(lambda groups: AdamW(groups, **options, **OPTIONS))
    for backend in (None, "inductor"):
        found, optimizer = trained(
            lambda groups, b=backend: AdamW(groups, backend=b, **options, **OPTIONS), device="cuda"
        )
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=3e-4 if options else 1e-6)
    assert optimizer.state[found[0]]["step"].device.type == "cpu"
    theirs, _ = trained(lambda groups: torch.optim.AdamW(groups, fused=True, **OPTIONS), device="cuda")
    if not options:
        for a, b in zip(found, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
