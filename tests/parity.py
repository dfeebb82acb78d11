"""The parity harness: does a mesh train the same model on the same data as one process does?

    check(reference, candidate, world_size=2)

trains both configurations a few steps in float32 with plain, unclipped SGD (Adam hides scale errors) and compares, in
the order in which things happen: token ids, initial weights, and for each step the loss, every gradient, the gradient
norm and the weights after the update. The first difference is the one that explains; it is named with tensor, step
and size.

A gradient passes when |g - g0| <= 1e-5 max(|g0|, 1e-6 x global norm) in L2, and must be exactly zero where g0 is. A
failure is repeated in float64: an error that vanishes there was rounding, one that stays is wrong.
"""

import contextlib
import copy
import hashlib
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import train
from config.schema import Config
from config.world import mesh_degrees
from data.build import build_data
from parallelisms.mesh import Mesh
from parallelisms.names import named_parameters, plain_name
from tests import parity_table, ranks

TOLERANCE = 1e-5
FLOOR = 1e-6
"""Share of the global gradient norm below which a tensor's own norm is not a fair measure of its error."""


@dataclass
class Trace:
    """What one configuration did, on rank 0, in full tensors."""

    tokens: dict[int, str] = field(default_factory=dict)
    """Sample id -> digest of its token ids and labels, over all ranks and steps."""
    sample_counts: list[int] = field(default_factory=list)
    """Samples read in each step over all ranks that read different ones."""
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """After each update; the balancing state of experts too."""
    loads: list[list[list[int]]] = field(default_factory=list)
    """Of each step, layers x experts, where there are any."""


@dataclass
class Report:
    """The largest relative error seen of each kind. ``failures`` is empty when the two agree."""

    errors: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def check(
    reference: Config,
    candidate: Config,
    *,
    world_size: int,
    steps: int = 2,
    reference_world: int = 1,
    max_norm: float = 0.0,
) -> Report:
    """Raise AssertionError, explained, unless ``candidate`` on ``world_size`` ranks trains as ``reference`` does.

    With ``max_norm`` the updates are of clipped gradients; those compared are as they were before.
    """
    found = trace(candidate, world_size, steps, max_norm=max_norm)
    report = compare(_reference(reference, reference_world, steps, max_norm), found)
    if report.failures:
        exact = compare(
            trace(reference, reference_world, steps, float64=True, max_norm=max_norm),
            trace(candidate, world_size, steps, float64=True, max_norm=max_norm),
            1e-10,
        )
        verdict = (
            "the difference stays in float64: it is wrong, not rounded"
            if exact.failures
            else ("in float64 the two agree: the difference is rounding")
        )
        raise AssertionError("\n".join([*report.failures[:12], verdict, *exact.failures[:3]]))
    parity_table.record(world_size, report.errors)
    return report


_references: dict[str, Trace] = {}


def _reference(config: Config, world_size: int, steps: int, max_norm: float) -> Trace:
    """The :func:`trace` that many rows are held against, made once a session. Nobody changes it."""
    key = f"{world_size} ranks, {steps} steps, norm {max_norm}: {config!r}"
    if key not in _references:
        _references[key] = trace(config, world_size, steps, max_norm=max_norm)
    return _references[key]


def trace(config: Config, world_size: int, steps: int, *, float64: bool = False, max_norm: float = 0.0) -> Trace:
    """Train ``config`` on ``world_size`` gloo ranks and return what happened."""
    config = copy.deepcopy(config)
    config.optimizer.name = "SGD"
    config.optimizer.weight_decay = 0.0
    config.training.max_norm = max_norm
    for key in ("mixed_precision_param", "mixed_precision_reduce"):
        setattr(config.training, key, "float64" if float64 else "float32")
    return ranks.run(world_size, _train, config, steps)[0]


def _train(config: Config, steps: int) -> Trace:
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    float64 = config.training.mixed_precision_param == "float64"
    torch.manual_seed(1234 + rank)  # nothing may depend on the global generator
    mesh = Mesh(rank=rank, **mesh_degrees(config, world_size))
    if dist.is_initialized():
        mesh.connect("cpu")
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if float64 else torch.float32)
    try:
        pipeline = build_data(config, dp_rank=mesh.dp_rank, dp_degree=mesh.dp_degree)
        model = train.build_model(config, mesh, torch.device("cpu"))
        step = train.build_step(config, model, mesh, torch.device("cpu"))
        with _gathered(model):
            result = Trace(initial=_full(dict(named_parameters(model)), mesh))
        for _ in range(steps):
            batch = pipeline.train.next_step()
            _record_tokens(result, batch)
            step.optimizer.zero_grad()
            loss_sum = step.forward_backward(batch)
            with _gathered(model, with_grads=True):
                gradients = {n: p.grad for n, p in named_parameters(model)}
                missing = [n for n, g in gradients.items() if g is None]
                assert not missing, f"no gradient for {missing}"
                result.gradients.append(_full(gradients, mesh))
            result.norms.append(float(step.clip()))
            step.update(batch)
            with _gathered(model):
                result.weights.append(_full(dict(named_parameters(model)) | _balancing_state(model), mesh))
            if step.experts is not None:
                result.loads.append(step.experts.all_loads().tolist())
            result.losses.append(float(mesh.sum_over_data(loss_sum)) / batch.global_valid_tokens)
        pipeline.close()
    finally:
        torch.set_default_dtype(default)
    return result


def _balancing_state(model: nn.Module) -> dict[str, torch.Tensor]:
    kept = ("balance.bias", "balance.previous_counts")
    return {plain_name(n): b.to(torch.get_default_dtype()) for n, b in model.named_buffers() if n.endswith(kept)}


def _gathered(model: nn.Module, *, with_grads: bool = False) -> contextlib.AbstractContextManager[None]:
    """Within it, parameters that FSDP1 keeps as plain pieces are whole."""
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=with_grads)
    return contextlib.nullcontext()


def _full(tensors: dict[str, Any], mesh: Mesh) -> dict[str, torch.Tensor]:
    """Whole CPU copies, of all pipeline stages; a collective. What two stages hold must be the same."""
    mine = {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}
    if mesh.pp_mesh is None:
        return mine
    stages: list[dict[str, torch.Tensor]] = [{} for _ in range(mesh.pp)]
    dist.all_gather_object(stages, mine, group=mesh.pp_mesh.get_group())
    whole = stages[0]
    for stage in stages[1:]:
        for name, tensor in stage.items():
            assert torch.equal(whole.setdefault(name, tensor), tensor), f"{name} differs between two stages"
    return whole


def _record_tokens(result: Trace, batch: Any) -> None:
    mine = {}
    for micro_batch in batch.micro_batches:
        for row, sample in enumerate(micro_batch.sample_ids):
            content = micro_batch.tokens[row].numpy().tobytes() + micro_batch.labels[row].numpy().tobytes()
            mine[sample] = hashlib.sha256(content).hexdigest()
    everyone = [mine]
    if dist.is_initialized():
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
    # Ranks that must read the same samples (tp, cp, pp) do not count twice; ranks that must not are caught here.
    distinct = {s for samples in everyone for s in samples}
    result.sample_counts.append(len(distinct))
    for samples in everyone:
        result.tokens.update(samples)


def compare(a: Trace, b: Trace, tolerance: float = TOLERANCE) -> Report:
    """Compare a reference ``a`` with ``b``."""
    report = Report()

    def fail(what: str) -> None:
        report.failures.append(what)

    def scalar(kind: str, step: int, x: float, y: float) -> None:
        error = abs(x - y) / max(abs(x), 1e-30)
        report.errors[kind] = max(report.errors.get(kind, 0.0), error)
        if not error <= tolerance:  # a NaN fails
            fail(
                f"step {step}: {kind} {y:.9g}, reference {x:.9g} (relative {error:.1e}, ratio {y / x if x else 0:.6f})"
            )

    if a.sample_counts != b.sample_counts or a.tokens != b.tokens:
        different = [s for s in sorted(a.tokens.keys() | b.tokens.keys()) if a.tokens.get(s) != b.tokens.get(s)]
        fail(
            f"data: {b.sample_counts} samples a step, reference {a.sample_counts}; samples that differ: {different[:8]}"
        )
    for name in [*a.initial, *(b.initial.keys() - a.initial.keys())]:
        x, y = a.initial.get(name), b.initial.get(name)
        if x is None or y is None or not torch.equal(x, y):
            fail(f"initial weights: {name} is not bit-identical")
    for step, (x, y) in enumerate(zip_longest(a.loads, b.loads), 1):
        if x != y:
            fail(f"step {step}: expert loads {y}, reference {x}")
    for i in range(len(a.losses)):
        scalar("loss", i + 1, a.losses[i], b.losses[i])
        for name, x in a.gradients[i].items():
            _tensor(report, "gradient", i + 1, name, x, b.gradients[i].get(name), a.norms[i], tolerance)
        scalar("gradient norm", i + 1, a.norms[i], b.norms[i])
        for name, x in a.weights[i].items():
            _tensor(report, "weights", i + 1, name, x, b.weights[i].get(name), 0.0, tolerance)
    return report


def _tensor(
    report: Report,
    kind: str,
    step: int,
    name: str,
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: float,
    tolerance: float,
) -> None:
    if y is None or y.shape != x.shape:
        report.failures.append(f"step {step}: {kind} of {name} is missing or has another shape")
        return
    size = float(x.norm())
    error = float((y - x).norm()) / max(size, FLOOR * norm, 1e-30)
    report.errors[kind] = max(report.errors.get(kind, 0.0), error)
    if size == 0.0 and float(y.norm()) != 0.0:
        report.failures.append(f"step {step}: {kind} of {name} must be exactly zero, its norm is {float(y.norm()):.3g}")
    elif not error <= tolerance:
        ratio = float(y.norm()) / size if size else float("inf")
        report.failures.append(f"step {step}: {kind} of {name} off by {error:.1e} (norm ratio {ratio:.6f})")
