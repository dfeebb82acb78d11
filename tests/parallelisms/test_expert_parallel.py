"""Expert parallelism beyond parity: ranks without tokens, bytes sent, overlap, ids of experts, memory."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from model.permute import Plan, ids_of, plan_pieces
from parallelisms.expert_parallel import DISPATCHERS
from parallelisms.materialize import materialize
from parallelisms.names import named_parameters
from tests import parity, ranks
from tests.parallelisms.test_parity_expert import COPIES, EP2, EP4, FULL, ONCE, OVERLAP, PARTS, SHARED, TP2
from tests.parallelisms.test_parity_tensor import sparse
from tests.parallelisms.test_zero import built, float_bytes
from tests.trainer.test_checkpoint import configuration, run

FLOAT32 = {"training__mixed_precision_param": "float32"}
ONE_EXPERT = {
    "moe__balance": "forced_skew", "moe__skew_strength": 1e4, "moe__top_k": 1, "moe__z_loss_coeff": 0.1,
}  # fmt: skip

# ---- ranks without tokens


SENT = {"expert": {}, "rank": ONCE, "experts in parts": PARTS}


@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("kernels", ["grouped_mm", pytest.param("loop", marks=pytest.mark.slow)])
def test_all_tokens_to_one_expert(sent, kernels):
    """One rank gets everything, the other nothing: no hang, every gradient is there, those of the others are zero."""
    reference = parity.trace(sparse(**ONE_EXPERT, moe__experts="loop"), 1, 2)
    config = sparse(**ONE_EXPERT, **EP2, **SENT[sent], moe__experts=kernels)
    report = parity.compare(reference, parity.trace(config, 2, 2))
    assert not report.failures, report.failures
    for gradients in reference.gradients:
        for layer in range(2):
            alive = gradients[f"layers.{layer}.moe.experts.w2"].flatten(1).any(1)
            assert alive.sum() == 1, "the case is not what it is meant to be"


@pytest.mark.slow
@pytest.mark.parametrize("layout", [EP4, TP2 | EP4, EP2 | FULL, EP2 | COPIES], ids=["ep4", "tp2", "full", "hsdp"])
@pytest.mark.parametrize("sent", SENT)
def test_all_tokens_to_one_expert_elsewhere(layout, sent):
    model = ONE_EXPERT | {"moe__num_experts": 8}
    parity.check(sparse(**model), sparse(**model | layout | SENT[sent]), world_size=4)


# ---- bytes


class Sent(TorchDispatchMode):
    """Bytes that this rank puts into all-to-alls of rows of one width, and which operators ran in which order."""

    def __init__(self, width: int = 0):
        super().__init__()
        self.width, self.bytes, self.order = width, 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t is DTensor for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        sent = {"all_to_all_single": 0, "alltoall_base_": 1}.get(name)  # the second is given where to write
        if sent is not None and args[sent].is_floating_point():
            self.order.append("send")
            if args[sent].shape[-1] == self.width:
                self.bytes += args[sent].numel() * args[sent].element_size()
        elif name == "wait_tensor" and args[0].is_floating_point():
            self.order.append("wait")
        elif name in ("mm", "addmm", "bmm"):
            self.order.append("product")
        return out


def exchange(kind: str, everyones: list[torch.Tensor], parts: int) -> int:
    """Bytes of rows sent out and back by one dispatcher. Its expert e multiplies by e + 1."""
    torch.manual_seed(dist.get_rank())
    experts = everyones[dist.get_rank()]
    group, x = dist.group.WORLD, torch.randn(len(experts), 16, requires_grad=True)
    dispatcher = DISPATCHERS[kind](group, 8, overlap=False, parts=parts)
    weights = torch.rand(experts.shape, requires_grad=True)

    def compute(rows, ids, weights, w13, w2, max_rows):
        ids = ids_of(ids) if isinstance(ids, Plan) else ids
        assert max_rows == max(1, int((ids < len(w13)).sum()))
        return rows * (F.pad(w13, (0, 1))[ids] * weights).sum(1, keepdim=True)

    def local(handle, serve):
        factors = torch.arange(1.0, 9.0).view(2, 4)[group.rank()]
        return serve(handle, compute, plan_pieces, factors, factors)

    with Sent(16) as sent:
        out, _ = dispatcher(x, experts, weights, None, local)
    expected = x * ((experts + 1) * weights * (experts < 8)).sum(1, keepdim=True)
    torch.testing.assert_close(out, expected)
    for found, wanted in zip(
        *(torch.autograd.grad(y.square().sum(), (x, weights)) for y in (out, expected)), strict=True
    ):
        torch.testing.assert_close(found, wanted)
    return sent.bytes


@pytest.mark.parametrize("nowhere", ["none", "some", "all of a rank"])
def test_a_token_travels_once_a_rank_or_once_an_expert(nowhere):
    torch.manual_seed(0)
    experts = torch.stack([torch.randperm(8)[:4] for _ in range(64)])
    if nowhere == "some":
        experts[torch.rand(experts.shape) < 0.3] = 8
        experts[:5] = 8
    everyones = [torch.full_like(experts, 8) if nowhere == "all of a rank" else experts, experts]
    chosen = sum(experts[experts < 8].numel() for experts in everyones)
    pairs = sum(len({e // 4 for e in row.tolist() if e < 8}) for experts in everyones for row in experts)
    # Rows of 16 floats go out and come back, those that a rank keeps included.
    for kind, rows, parts in (("all_to_all", chosen, 1), ("all_to_all", chosen, 3), ("all_to_all_dedup", pairs, 1)):
        assert sum(ranks.run(2, exchange, kind, everyones, parts)) == 2 * rows * 16 * 4, (kind, parts)
    assert pairs < 0.7 * chosen


# ---- overlap


def trained(config, steps: int = 2) -> dict[str, torch.Tensor]:
    _, model, step, batch = built(config)
    for _ in range(steps):
        step(batch)
    return {n: p.to_local().detach().clone() for n, p in named_parameters(model)}


@pytest.mark.parametrize("dispatcher", [{}, pytest.param(ONCE, marks=pytest.mark.slow)], ids=["expert", "rank"])
def test_overlap_changes_no_bit(dispatcher):
    plain = ranks.run(2, trained, sparse(**SHARED, **EP2, **FLOAT32, **dispatcher))
    overlapped = ranks.run(2, trained, sparse(**SHARED, **EP2, **FLOAT32, **OVERLAP, **dispatcher))
    for a, b in zip(plain, overlapped, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def order_of_operators(config) -> list[str]:
    _, model, step, batch = built(config)
    with Sent() as seen:
        step.forward_backward(batch)
    return seen.order


def products_on_the_way(order: list[str]) -> Counter:
    """Products between a send and the wait for it -> how often."""
    found, count, under_way = Counter(), 0, False
    for what in order:
        if what == "send":
            count, under_way = 0, True
        elif what == "wait" and under_way:
            found[count] += 1
            under_way = False
        elif what == "product":
            count += 1
    return found


def test_shared_experts_are_computed_while_tokens_travel():
    model = SHARED | {"training__global_batch_size": 4}  # one layer with experts, one micro-batch a rank
    plain = products_on_the_way(ranks.run(2, order_of_operators, sparse(**model, **EP2, **FLOAT32))[0])
    overlapped = products_on_the_way(ranks.run(2, order_of_operators, sparse(**model, **EP2, **FLOAT32, **OVERLAP))[0])
    assert set(plain) == {0}
    # w1, w3, w2 on the way out; in backward two products for each.
    assert overlapped[3] == 1 and overlapped[6] == 1


# ---- which expert is where


def experts_of(model) -> dict[str, torch.Tensor]:
    return {n: p for n, p in named_parameters(model) if ".experts.w" in n}


def numbered(name: str, size: torch.Size, device: torch.device) -> torch.Tensor:
    """Every expert's weights hold its id, in hundredths."""
    if ".experts.w" not in name:
        return torch.full(size, 0.02, device=device)
    return (torch.arange(size[0], device=device) / 100)[:, None, None].expand(size)


def ids_after_steps(config) -> None:
    mesh, model, step, batch = built(config)
    materialize(model, draw=numbered, device=torch.device("cpu"))
    for _ in range(3):
        step(batch)
    for name, parameter in experts_of(model).items():
        whole = parameter.full_tensor().detach()
        ids = numbered(name, whole.shape, whole.device)
        assert (whole - ids).abs().max() < 0.004, "an expert has weights of another one"
        assert not torch.equal(whole, ids)
        if mesh.efsdp == 1:
            share = ids.chunk(mesh.ep)[mesh.expert_mesh["ep"].get_local_rank()]
            assert (parameter.to_local() - share).abs().max() < 0.004


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, EP2), (4, EP2), pytest.param(4, TP2 | EP4, marks=pytest.mark.slow)],
    ids=["ep2", "fsdp2 x ep2", "fsdp2 x tp2 x ep4"],
)
def test_each_expert_is_still_itself_after_three_steps(world_size, layout):
    ranks.run(world_size, ids_after_steps, sparse(**layout, **FLOAT32, optimizer__lr=1e-3))


def replicas(config) -> list[torch.Tensor]:
    mesh, model, step, batch = built(config)
    for _ in range(3):
        step(batch)
    group = mesh.device_mesh["dp_replicate"].get_group()
    found = []
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter.to_local()) for _ in range(2)]
        dist.all_gather(copies, parameter.to_local().detach(), group=group)
        found.append(torch.equal(*copies))
    return found


@pytest.mark.slow
def test_copies_of_experts_stay_equal_to_the_bit():
    assert all(all(found) for found in ranks.run(4, replicas, sparse(**EP2, **COPIES, **FLOAT32)))


EXPERTS = {
    "model__name": "moe", "model__flavor": "debug_moe", "moe__balance": "bias_sign", "moe__hidden_dim": 16,
    "moe__num_experts": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(4, EP4), pytest.param(1, {}, marks=pytest.mark.slow), pytest.param(2, TP2 | EP2, marks=pytest.mark.slow)],
    ids=["ep4", "one process", "tp2 x ep2"],
)
def test_a_checkpoint_moves_between_degrees(world_size, layout, tmp_path):
    """Weights, optimizer states and balancing biases, whole and by name, from EP 2."""
    config = configuration(**EXPERTS, **EP2, model__vocab_size=516)
    saved = ranks.run(2, run, config, tmp_path, 4)[0]
    other = configuration(**EXPERTS, **layout, model__vocab_size=516)
    loaded = ranks.run(world_size, run, other, tmp_path, 4)[0]
    assert loaded["from"] == 4 and loaded["losses"] == []
    assert loaded["weights"] == saved["weights"] and loaded["states"] == saved["states"]


# ---- norm, memory, metrics


def clipped(config) -> tuple[float, float]:
    _, model, step, batch = built(config)
    step.forward_backward(batch)
    before = float(step.clip_grad_norm(model, 1e-3))
    return before, float(step.clip_grad_norm(model, 0.0))


def test_one_norm_clips_both_meshes():
    (before, after), *others = ranks.run(4, clipped, sparse(**EP2, **FLOAT32))
    assert before > 0.01 and after == pytest.approx(1e-3, rel=1e-4)
    assert all(found == (before, after) for found in others)


def held_after(config) -> list[int]:
    _, model, step, batch = built(config)
    held = []
    for _ in range(6):
        step(batch)
        held.append(float_bytes())
    return held


@pytest.mark.parametrize("sent", ["expert", pytest.param("rank", marks=pytest.mark.slow), "experts in parts"])
def test_recomputation_leaves_nothing_behind(sent):
    """An exchange under checkpointing leaks where recomputation stops early."""
    config = sparse(**EP2, **FULL, **FLOAT32, **SENT[sent])
    for held in ranks.run(2, held_after, config):
        assert len(set(held[1:])) == 1, held
