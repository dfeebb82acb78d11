"""What is moved to CPU memory or recomputed on a GPU: the same gradients and updates, and less memory at the peak."""

import os
import shutil
from collections.abc import Callable

import pytest
import torch

from config.flavors import ModelShape
from config.schema import Moe, Optimizer
from config.shapes import MoEShape
from model.attention import attention_backend
from model.decoder import Decoder
from model.initial_weights import draw, initial_value
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.activation_offload import apply_activation_offload
from parallelisms.compile import apply_compile
from parallelisms.names import named_parameters
from tests.test_train import launch, lines, losses
from trainer.optimizer import build_optimizer
from trainer.state_offload import PIECE_BYTES, OffloadedStates

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LAYERS, ROWS, LENGTH, DIM = 12, 4, 512, 512
SHAPE = ModelShape(
    vocab_size=512, dim=DIM, n_layers=LAYERS, n_heads=8, n_kv_heads=8, hidden_dim=1536, max_seq_len=LENGTH
)
EXPERTS = ModelShape(
    vocab_size=512, dim=DIM, n_layers=4, n_heads=8, n_kv_heads=8, hidden_dim=1536, max_seq_len=LENGTH,
    moe=MoEShape(num_experts=8, top_k=2, hidden_dim=1024),
)  # fmt: skip
HIDDEN_BYTES = ROWS * LENGTH * DIM * 4


def built(mode: str, shape: ModelShape = SHAPE, *, offload: bool = False, budget: float | None = None) -> Decoder:
    model = Decoder(shape, attention_backend("sdpa"), LENGTH, moe=Moe(experts="loop")).cuda()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(draw(name, p.shape, initial_value(name, shape), 0, p.device))
    if mode != "none":
        apply_activation_checkpoint(model, mode=mode, selective_ac_option="2")
    if offload:
        apply_activation_offload(model)
    if budget is not None:
        torch._dynamo.reset()
        apply_compile(model, backend="inductor", inside_wrapper=offload, memory_budget=budget)
    return model


def passed(model: Decoder, tokens: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of a forward and backward pass, and its peak above what is held before and after."""
    model.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(tokens).logsumexp(-1).sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {name: p.grad.clone() for name, p in named_parameters(model)}, peak


def compared(first: Callable[[], Decoder], second: Callable[[], Decoder], tolerance: float) -> tuple[int, int]:
    """The peaks of two models over three batches of fresh tokens, their gradients alike."""
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    found = []
    for make in (first, second):
        generator, model, peak = torch.Generator("cuda").manual_seed(seed), make(), 0
        gradients = []
        for _ in range(4):
            tokens = torch.randint(512, (ROWS, LENGTH), generator=generator, device="cuda")
            each, peak = passed(model, tokens)
            gradients.append(each)
        found.append((gradients, peak))
    (expected, peak), (other, other_peak) = found
    for batch, (a, b) in enumerate(zip(expected, other, strict=True)):
        for name, gradient in a.items():
            error = (b[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
            assert error <= tolerance, f"batch {batch}, {name}: {error:.1e}"
    return peak, other_peak


def test_offload_holds_two_blocks_and_not_all():
    peak, moved = compared(lambda: built("none"), lambda: built("none", offload=True), 1e-5)
    assert moved < 0.5 * peak


def test_offload_of_recomputed_blocks_moves_their_inputs():
    peak, moved = compared(lambda: built("full"), lambda: built("full", offload=True), 1e-5)
    assert peak - moved > (LAYERS - 5) * HIDDEN_BYTES


@pytest.mark.parametrize("mode", ["none", "full"])
def test_offload_of_compiled_blocks(mode):
    first, second = (lambda o=o: built(mode, offload=o, budget=1.0) for o in (False, True))
    peak, moved = compared(first, second, 1e-4)
    assert moved < 0.6 * peak if mode == "none" else peak - moved > (LAYERS - 5) * HIDDEN_BYTES


def test_a_memory_budget_is_kept():
    peak, less = compared(lambda: built("none", budget=1.0), lambda: built("none", budget=0.1), 1e-4)
    assert less < 0.7 * peak


@pytest.mark.parametrize("kind", ["none", "full"])
def test_checkpointing_around_experts_is_between_none_and_full(kind):
    peak, other = compared(lambda: built("experts", EXPERTS), lambda: built(kind, EXPERTS), 1e-4)
    assert peak < other if kind == "none" else other < peak


def test_nested_checkpointing_saves_nothing_more():
    once, twice = compared(lambda: built("full"), lambda: built("nested"), 1e-5)
    assert twice > 0.9 * once


def test_states_in_cpu_memory_give_the_same_updates_with_less_memory():
    """Gradients are given, so nothing but the update is compared: to the bit."""
    seed = int(torch.randint(2**31, ()))
    print(f"seed {seed}")
    weights, held, peaks = [], [], []
    sizes = [(4096, 4096)] * 12 + [(64,), (32000, 4096)]
    for offloaded in (False, True):
        torch.cuda.empty_cache()
        generator = torch.Generator("cuda").manual_seed(seed)
        before = torch.cuda.memory_allocated()
        parameters = [torch.nn.Parameter(torch.randn(s, generator=generator, device="cuda")) for s in sizes]
        section = Optimizer(weight_decay=0.1)
        optimizer: torch.optim.Optimizer = build_optimizer(((str(i), p) for i, p in enumerate(parameters)), section)
        optimizer = OffloadedStates(optimizer) if offloaded else optimizer
        for step in range(4):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator, device="cuda") / (step + 1)
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        weights.append([p.detach().cpu() for p in parameters])
        states = [optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq")]
        assert all(s.device.type == ("cpu" if offloaded else "cuda") for s in states)
        assert not offloaded or all(s.is_pinned() for s in states)
        del parameters, optimizer, states, p
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    total = 8 * sum(torch.Size(s).numel() for s in sizes)
    largest = 8 * 32000 * 4096
    assert held[0] - held[1] > 0.99 * total
    assert peaks[1] - held[1] < largest + 3 * PIECE_BYTES + 2**26


SHORT = ["--training.steps", "20", "--metrics.log_freq", "1", "--validation.enable", "false"]
WIDE = ["--model.dim", "512", "--model.hidden_dim", "2048", "--model.n_layers", "8"]
WIDE += ["--training.seq_len", "256", "--training.local_batch_size", "8"]  # activations outweigh the rest
ON_GPU = dict(os.environ)
PEAK = "memory/max_active(GiB)"


def trained(folder, *options: str, ranks: int = 1) -> dict[int, float]:
    done = launch(folder, *SHORT, *WIDE, *options, ranks=ranks, environment=ON_GPU)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(folder)


def peak_gib(folder) -> float:
    return max(line[PEAK] for line in lines(folder) if PEAK in line)


@pytest.mark.parametrize(
    "options", [["--optimizer.state_offload"], ["--activation_checkpoint.offload"]], ids=["states", "activations"]
)
def test_a_run_learns_the_same(tmp_path, options):
    plain, moved = trained(tmp_path / "plain"), trained(tmp_path / "moved", *options)
    assert max(abs(plain[step] - moved[step]) for step in plain) < 2e-3
    assert peak_gib(tmp_path / "moved") < peak_gib(tmp_path / "plain")


def continues(folder, *options: str, ranks: int) -> None:
    """Interrupted after step 10 and started again, a run repeats what it did before."""
    saving = ["--checkpoint.enable", "--checkpoint.interval", "10", *options]
    whole = trained(folder, *saving, ranks=ranks)
    (folder / "DONE").unlink()
    shutil.rmtree(folder / "checkpoint" / "step-20")
    again = trained(folder, *saving, ranks=ranks)
    assert max(abs(whole[step] - again[step]) for step in range(11, 21)) < 2e-3


def test_a_run_with_states_in_cpu_memory_continues(tmp_path):
    continues(tmp_path / "run", "--optimizer.state_offload", ranks=1)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("model", [[], ["--model.name", "moe", "--model.flavor", "debug_moe"]], ids=["dense", "moe"])
def test_shards_in_cpu_memory_train_the_same(tmp_path, model):
    plain = trained(tmp_path / "plain", *model, ranks=2)
    moved = trained(tmp_path / "moved", *model, "--training.enable_cpu_offload", ranks=2)
    # The update runs on the CPU, whose rounding is another: some tokens change their experts.
    assert max(abs(plain[step] - moved[step]) for step in plain) < (2e-2 if model else 2e-3)
    assert peak_gib(tmp_path / "moved") < peak_gib(tmp_path / "plain")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_shards_in_cpu_memory_are_saved_and_continue(tmp_path, mode):
    continues(tmp_path / "run", "--training.enable_cpu_offload", "--checkpoint.async_mode", mode, ranks=2)


@pytest.mark.multi_gpu
def test_states_of_shards_in_cpu_memory_continue(tmp_path):
    continues(tmp_path / "run", "--optimizer.state_offload", ranks=2)
