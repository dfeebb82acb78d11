"""A run that stops and goes on is the run that did not stop, bit for bit."""

import copy
import hashlib
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

import train
from config.errors import ConfigError
from config.schema import Checkpoint, Config
from config.world import mesh_degrees
from data.build import build_data
from parallelisms.mesh import Mesh
from parallelisms.names import named_parameters, plain_name
from parallelisms.zero import holder_of_states
from tests import ranks
from trainer import checkpoint
from trainer.checkpoint import Checkpointer, complete_steps, step_to_continue
from trainer.loss_watch import LossWatch
from trainer.schedule import set_learning_rate

STEPS = 8


def configuration(**changes) -> Config:
    """Accumulation, prefetch, AdamW; a vocabulary that two ranks cannot share evenly."""
    config = Config()
    values = {
        "model__n_layers": 2, "model__dim": 32, "model__hidden_dim": 64, "model__vocab_size": 515,
        "data__tokenizer": "bpe", "data__tokenizer_vocab_size": 512, "data__prefetch_steps": 2,
        "training__seq_len": 32, "training__local_batch_size": 2, "training__global_batch_size": 8,
        "training__mixed_precision_param": "float32", "training__steps": STEPS, "lr_scheduler__warmup_steps": 3,
        "checkpoint__enable": True, "checkpoint__interval": 4,
    }  # fmt: skip
    for key, value in {**values, **changes}.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


DDP = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
MOE = {
    "model__name": "moe",
    "model__flavor": "debug_moe",
    "moe__balance": "bias_sign",
    "model__n_layers": 2,
    "model__vocab_size": 515,
}
# The embedding alone has no weight decay, so one of the ranks has an empty group of parameters.
ZERO_1 = {"parallelism__zero_stage": 1, "optimizer__weight_decay_skip": ["embedding"]}
PP = {"parallelism__pipeline_parallel_degree": 2, "training__local_batch_size": 4}
MESHES = {
    "one process": (1, {}), "ddp": (2, DDP), "zero 1": (2, ZERO_1), "fsdp": (2, {}), "fsdp, experts": (2, MOE),
    "pipeline, experts": (2, MOE | PP | {"model__n_layers": 4, "parallelism__pipeline_parallel_microbatch_size": 4}),
}  # fmt: skip
TP = {"parallelism__tensor_parallel_degree": 2, "model__vocab_size": 516}


def digests(tensors) -> dict[str, str]:
    """Name -> hash of the whole tensor's bytes; a collective for sharded tensors."""
    whole = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().contiguous() for n, t in tensors.items()}
    return {n: hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for n, t in whole.items()}


def run(config: Config, folder: Path, until: int) -> dict:
    """Train from where ``folder`` stands to step ``until``; what a user could tell two runs apart by."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = Mesh(rank=rank, **mesh_degrees(config, size))
    if dist.is_initialized():
        mesh.connect("cpu")
    pipeline = build_data(config, dp_rank=mesh.dp_rank, dp_degree=mesh.dp_degree)
    model = train.build_model(config, mesh, torch.device("cpu"))
    watch = LossWatch(mesh.sum_over_data, skip=False)
    step_once = train.build_step(config, model, mesh, torch.device("cpu"), watch.accept)
    checkpointer = Checkpointer(
        folder,
        config.checkpoint,
        model=model,
        optimizer=holder_of_states(step_once.optimizer),
        plain_name=plain_name,
        parts={"data": pipeline.train, "watch": watch},
        steps=config.training.steps,
    )
    done = checkpointer.restore()
    losses, saved = [], {}
    for step in range(done + 1, until + 1):
        batch = pipeline.train.next_step()
        rate = set_learning_rate(
            step_once.optimizer, step - 1, config.optimizer.lr, config.lr_scheduler, config.training.steps
        )
        step_once(batch)
        losses.append((step, watch.latest()[0], rate, step_once.optimizer.param_groups[0]["lr"], batch.sample_ids))
        if checkpointer.due(step):
            checkpointer.save(step)
            saved[step] = digests(dict(named_parameters(model)))
    checkpointer.wait()
    pipeline.close()
    held = holder_of_states(step_once.optimizer).state
    states = {
        f"{name}.{key}": value
        for name, parameter in named_parameters(model)
        for key, value in held.get(parameter, {}).items()
    }
    balance = {plain_name(n): b for n, b in model.named_buffers() if n.endswith("balance.bias")}
    return {
        "from": done,
        "losses": losses,
        "weights": digests(dict(named_parameters(model)) | balance),
        "states": digests(states),
        "saved": saved,
        "skipped": watch.skipped_steps,
    }


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_continued_run_is_bit_identical(mesh, mode, tmp_path):
    size, changes = MESHES[mesh]
    config = configuration(**changes, checkpoint__async_mode=mode, checkpoint__interval=10, training__steps=20)
    straight = ranks.run(size, run, config, tmp_path / "straight", 20)
    first = ranks.run(size, run, config, tmp_path / "parts", 10)
    second = ranks.run(size, run, config, tmp_path / "parts", 20)
    for whole, before, after in zip(straight, first, second, strict=True):
        assert after["from"] == 10 and len(whole["losses"]) == 20
        assert before["losses"] + after["losses"] == whole["losses"]
        assert after["weights"] == whole["weights"] and after["states"] == whole["states"]
        assert after["weights"] != before["weights"]
    assert complete_steps(tmp_path / "parts") == [10, 20]


@pytest.mark.parametrize("mesh", [{}, PP, TP], ids=["fsdp", "pipeline", "tensor"])
def test_a_run_continues_on_another_mesh(mesh, tmp_path):
    """Names and shapes in a checkpoint are those of the whole model."""
    config = configuration(**mesh)
    ranks.run(2, run, config, tmp_path, 4)
    plain = copy.deepcopy(config)
    plain.parallelism.pipeline_parallel_degree = plain.parallelism.tensor_parallel_degree = 1
    alone = ranks.run(1, run, copy.deepcopy(plain), tmp_path, STEPS)[0]
    straight = ranks.run(1, run, plain, tmp_path / "straight", STEPS)[0]
    assert alone["from"] == 4
    for (_, loss, *_), (_, expected, *_) in zip(alone["losses"], straight["losses"][4:], strict=True):
        assert loss == pytest.approx(expected, abs=1e-5)


FSDP = (2, {})
PP2 = (2, {"parallelism__pipeline_parallel_degree": 2})
PP4 = (4, {"parallelism__pipeline_parallel_degree": 4})
RING2 = (2, {"parallelism__context_parallel_degree": 2})
V = (2, PP2[1] | {"parallelism__pipeline_parallel_schedule": "ZBVZeroBubble"})
MOVES = {
    "zero 1 to fsdp2": ((2, {"parallelism__zero_stage": 1}), FSDP),
    "fsdp2 to zero 1": (FSDP, (2, {"parallelism__zero_stage": 1})),
    "pp2 to fsdp2": (PP2, FSDP),
    "fsdp2 to pp2": (FSDP, PP2),
    "pp2 to pp4": (PP2, PP4),
    "pp2 to a V": (PP2, V),
    "pp2 to zero 1": (PP2, (2, {"parallelism__zero_stage": 1})),
    "ring 2 to one process": (RING2, (1, {})),
    "fsdp2 to ring 2": (FSDP, RING2),
}


# Each direction once; the rest in the slow tier.
QUICK = [
    ("ring 2 to one process", False),
    ("zero 1 to fsdp2", False),
    ("fsdp2 to zero 1", False),
    ("pp2 to pp4", False),
    ("pp2 to fsdp2", True),
]
SLOW = [(m, e) for m in MOVES for e in (False, True) if (m, e) not in QUICK and not (e and "zero 1" in m)]


@pytest.mark.parametrize(("move", "experts"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_run_moves_to_another_mesh(move, experts, tmp_path):
    """Weights, states and the balance of experts arrive to the bit, and the run goes on as if it had stayed."""
    both = MOE | {"parallelism__pipeline_parallel_microbatch_size": 4} if experts else {}
    both = both | {"model__n_layers": 4, "training__local_batch_size": 4, "training__global_batch_size": 16}
    (size, before), (other_size, after) = ((n, configuration(**both, **mesh)) for n, mesh in MOVES[move])
    saved = ranks.run(size, run, before, tmp_path / "moved", 4)
    there = ranks.run(other_size, run, after, tmp_path / "moved", 4)
    for what in ("weights", "states"):
        assert whole(there, what) == whole(saved, what)
    moved = ranks.run(other_size, run, after, tmp_path / "moved", STEPS)[0]
    stayed = ranks.run(size, run, before, tmp_path / "stayed", STEPS)[0]
    assert moved["from"] == 4
    for (_, loss, *_), (_, expected, *_) in zip(moved["losses"], stayed["losses"][4:], strict=True):
        assert loss == pytest.approx(expected, abs=1e-5)


def whole(results: list[dict], what: str) -> dict[str, str]:
    """Digests of all ranks; what two of them hold is the same."""
    found: dict[str, str] = {}
    for result in results:
        for name, digest in result[what].items():
            assert found.setdefault(name, digest) == digest, name
    return found


def _loaded(config: Config, folder: Path, step: int) -> dict[str, str]:
    config.checkpoint.load_step = step
    return run(config, folder, step)["weights"]


def test_a_background_save_holds_the_weights_of_its_step(tmp_path):
    """Training goes on while it is written (torch #144657: tensors on the CPU are not copied for us)."""
    config = configuration(checkpoint__async_mode="async", checkpoint__interval=2)
    saved = ranks.run(1, run, config, tmp_path, STEPS)[0]["saved"]
    assert len(set(map(str, saved.values()))) == len(saved) == 4
    for step, weights in saved.items():
        assert ranks.run(1, _loaded, copy.deepcopy(config), tmp_path, step)[0] == weights


def test_what_is_saved_in_the_background_is_a_copy(tmp_path, monkeypatch):
    """Whatever the writer's pace: what it is given stays that of its step while training goes on."""
    given = {}

    def never_writes(state, *, checkpoint_id, process_group):
        given[int(checkpoint_id.stem.removeprefix("step-"))] = state
        checkpoint_id.mkdir(parents=True)
        (written := Future()).set_result(None)
        return written

    monkeypatch.setattr(checkpoint.dcp, "async_save", never_writes)
    saved = run(configuration(checkpoint__async_mode="async", checkpoint__interval=2), tmp_path, 4)["saved"]
    assert len(set(map(str, saved.values()))) == 2
    for step, weights in saved.items():
        held = digests(given[step]["model"])
        assert {name: held[name] for name in weights} == weights


def test_when_a_step_is_saved(tmp_path):
    def due(**section) -> list[int]:
        model = nn.Linear(1, 1)
        parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "plain_name": str, "parts": {}}
        saves = Checkpointer(tmp_path, Checkpoint(enable=True, **section), steps=8, **parts)
        return [step for step in range(1, 9) if saves.due(step)]

    assert due(interval=3) == [3, 6, 8] and due(interval=100) == [8], "the last always"
    assert due(interval=4, enable_first_step_checkpoint=True) == [1, 4, 8]


def test_a_background_save_that_fails_is_told_and_one_that_is_waited_for_has_its_name(tmp_path, monkeypatch):
    config = configuration(checkpoint__async_mode="async")
    publish = Checkpointer._publish

    def late(self, step, begun):
        time.sleep(0.5)
        publish(self, step, begun)

    monkeypatch.setattr(Checkpointer, "_publish", late)
    run(config, tmp_path, 4)  # waits at its end
    assert complete_steps(tmp_path) == [4]

    def full(self, step, begun):
        raise OSError("no space left")

    monkeypatch.setattr(Checkpointer, "_publish", full)
    with pytest.raises(OSError, match="no space left"):
        run(config, tmp_path, STEPS)


def test_names_are_the_models_own(tmp_path):
    config = configuration(
        activation_checkpoint__mode="full", compile__enable=True, compile__backend="eager", training__steps=1
    )
    ranks.run(1, run, config, tmp_path, 1)
    names = set(FileSystemReader(tmp_path / "step-1").read_metadata().state_dict_metadata)
    assert "model.layers.0.attention.wq.weight" in names
    assert any(name.startswith("optimizer.state.layers.1.feed_forward.w2.weight.exp_avg") for name in names)
    assert not [name for name in names if "_orig_mod" in name or "_checkpoint_wrapped" in name or "module." in name]


def test_an_incomplete_checkpoint_is_passed_over(tmp_path):
    config = configuration(checkpoint__interval=2)
    ranks.run(1, run, config, tmp_path, 4)
    (tmp_path / "step-4").rename(tmp_path / "step-6.part")  # a kill before the rename
    (tmp_path / "step-7").mkdir()  # and one in the middle of a deletion
    assert complete_steps(tmp_path) == [2]
    assert ranks.run(1, run, config, tmp_path, 3)[0]["from"] == 2


def test_the_latest_k_are_kept(tmp_path):
    config = configuration(checkpoint__interval=1, checkpoint__keep_latest_k=2)
    ranks.run(1, run, config, tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-4", "step-5"]


def test_weights_alone_start_a_new_run(tmp_path):
    ranks.run(1, run, configuration(), tmp_path / "old", 4)
    config = configuration(checkpoint__initial_load_path=str(tmp_path / "old" / "step-4"))
    result = ranks.run(1, run, config, tmp_path / "new", 1)[0]
    fresh = ranks.run(1, run, configuration(), tmp_path / "fresh", 1)[0]
    assert result["from"] == 0 and [row[0] for row in result["losses"]] == [1]
    assert result["losses"][0][1] < fresh["losses"][0][1] - 0.02  # it has learned already


def test_a_step_that_is_not_there_is_named(tmp_path):
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / ".metadata").touch()
    section = Checkpoint(enable=True)
    assert step_to_continue(tmp_path, section) == 5
    assert step_to_continue(None, section) == 0
    section.load_step = 0
    assert step_to_continue(tmp_path, section) == 0, "from the beginning, though there is a checkpoint"
    section.load_step = 4
    with pytest.raises(ConfigError, match="checkpoint.load_step = 4: .* holds steps 5"):
        step_to_continue(tmp_path, section)
    with pytest.raises(ConfigError, match="checkpoint.initial_load_path = .*: no complete checkpoint"):
        step_to_continue(None, Checkpoint(enable=True, initial_load_path=str(tmp_path)))


def test_data_of_another_seed_is_refused(tmp_path):
    ranks.run(1, run, configuration(), tmp_path, 4)
    with pytest.raises(RuntimeError, match="trained on other data: debug.data_seed was 0, is 1"):
        ranks.run(1, run, configuration(debug__data_seed=1), tmp_path, STEPS)
