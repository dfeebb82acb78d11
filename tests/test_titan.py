"""The contract with torchtitan: names, signatures and the behaviour that the trainer counts on."""

import gc
import inspect
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import titan
from config.errors import ConfigError

ROOT = Path(__file__).parents[1]

# Every parameter of what is taken, in order. A change here means that a caller has to be read again.
SIGNATURES = {
    "clip_grad_norm_": [
        "parameters",
        "max_norm",
        "norm_type",
        "error_if_nonfinite",
        "foreach",
        "pp_mesh",
        "ep_enabled",
    ],
    "dist_sum": ["x", "mesh", "extra_pg"],
    "dist_max": ["x", "mesh", "extra_pg"],
    "dist_mean": ["x", "mesh", "extra_pg"],
    "GarbageCollection": ["gc_freq", "debug"],
    "TensorBoardLogger": ["log_dir", "tag"],
    "HuggingFaceTokenizer": ["config", "tokenizer_path"],
    "SelectiveAC": ["config", "dump_folder"],
    "FullAC": ["config", "dump_folder"],
}


@pytest.mark.parametrize("name", sorted(titan.TAKEN))
def test_signature(name: str) -> None:
    assert list(inspect.signature(getattr(titan, name)).parameters) == SIGNATURES[name]


def test_methods_the_trainer_calls() -> None:
    def parameters(function) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert parameters(titan.GarbageCollection.run) == ["self", "step_count"]
    assert parameters(titan.GarbageCollection.collect) == ["reason", "generation"]
    assert parameters(titan.TensorBoardLogger.log) == ["self", "metrics", "step"]
    assert parameters(titan.TensorBoardLogger.close) == ["self"]
    assert parameters(titan.SelectiveAC.apply) == parameters(titan.FullAC.apply) == ["self", "model"]
    assert parameters(titan.SelectiveAC.get_save_ops) == ["self"]
    config = {"preserve_rng_state", "determinism_check", "debug"}
    assert set(parameters(titan.FullAC.Config)) == config
    assert set(parameters(titan.SelectiveAC.Config)) == config | {"force_recompute_mm_shapes_by_fqns"}


def test_one_leaf_does_not_load_the_others() -> None:
    code = (
        "import sys, titan\n"
        "assert 'torch' not in sys.modules, 'importing titan alone loads nothing'\n"
        "titan.GarbageCollection\n"
        "print(sorted(m for m in ('tensorboard', 'tokenizers', 'tyro') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("found", ["0.2.2", None])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(name: str) -> str:
        if found is None:
            raise titan.importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(titan.importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match=r"0\.3\.0 is needed, found: (0\.2\.2|not installed)\..*pip install"):
        titan.peak_flops("NVIDIA H200")


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="MetricsProcessor"):
        titan.MetricsProcessor  # noqa: B018


def test_peak_flops(caplog: pytest.LogCaptureFixture) -> None:
    # lspci decides for torchtitan where it lists an H100, so the name alone is tested where it does not.
    assert titan.peak_flops("NVIDIA H200") == 989e12
    assert titan.peak_flops("NVIDIA A100-SXM4-80GB") in (312e12, 989e12)
    with caplog.at_level(logging.DEBUG):
        assert titan.peak_flops("Intel(R) Xeon(R) Processor") in (None, 989e12)
    assert not caplog.records


def test_clip_returns_the_norm_before_clipping() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    parameters[0].grad = torch.tensor([3.0, 0.0])
    parameters[1].grad = torch.tensor([4.0])
    assert titan.clip_grad_norm_(parameters, max_norm=1.0).item() == pytest.approx(5.0)
    assert parameters[1].grad.item() == pytest.approx(0.8, abs=1e-5)
    # An infinite limit measures and leaves every gradient as it is: what max_norm = 0 asks for.
    before = parameters[1].grad.clone()
    assert titan.clip_grad_norm_(parameters, max_norm=float("inf")).item() == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(parameters[1].grad, before)


def test_reductions_without_a_mesh_are_the_value() -> None:
    for reduce in (titan.dist_sum, titan.dist_max, titan.dist_mean):
        assert reduce(torch.tensor(2.5)) == 2.5


def test_garbage_collection_runs_by_step_and_silently(caplog: pytest.LogCaptureFixture) -> None:
    try:
        with caplog.at_level(logging.DEBUG):
            collection = titan.GarbageCollection(gc_freq=5)
            assert not gc.isenabled()
            assert [step for step in range(1, 12) if collection.run(step)] == [5, 10]
            logging.getLogger().info("a line of another file still passes")
        # torchtitan's structured logger does not propagate; what reaches the console comes through the root logger.
        assert [r.getMessage() for r in caplog.records if r.name == "root"] == ["a line of another file still passes"]
    finally:
        gc.enable()


@pytest.mark.parametrize("policy", ["FullAC", "SelectiveAC"])
def test_activation_checkpointing_wraps_each_block_and_keeps_gradients(policy: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict(
        {str(i): torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4)) for i in range(2)}
    )
    x = torch.randn(3, 4)

    def gradients() -> list[torch.Tensor]:
        hidden = x
        for block in model.layers.values():
            hidden = block(hidden)
        return list(torch.autograd.grad(hidden.square().sum(), list(model.parameters())))

    plain = gradients()
    kind = getattr(titan, policy)
    kind(kind.Config()).apply(model)
    assert all("CheckpointWrapper" in type(block).__name__ for block in model.layers.values())
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
