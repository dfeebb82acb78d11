import copy

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import titan
from config.flavors import resolve_shape
from config.schema import Model, Moe
from config.shapes import ModelShape, MoEShape
from model.attention import attention_backend
from model.balance import balances
from model.decoder import Decoder
from model.initial_weights import draw, initial_value
from model.moe import MoE, token_numbers, update_balance

SHAPE = ModelShape(
    vocab_size=64, dim=32, n_layers=3, n_heads=2, n_kv_heads=2, hidden_dim=48, max_seq_len=32,
    moe=MoEShape(num_experts=8, top_k=2, hidden_dim=16, num_shared_experts=1, first_dense_layers=1),
)  # fmt: skip


def model_with(shape: ModelShape = SHAPE, seed: int = 0, noise_seed: int = 0, **keys) -> Decoder:
    model = Decoder(shape, attention_backend("sdpa_math"), 32, Moe(**keys), noise_seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(draw(name, p.shape, initial_value(name, shape), seed, p.device))
    return model


def batch(rows: int = 4, seed: int = 0):
    tokens = torch.randint(0, 64, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def backward(model: Decoder, tokens: torch.Tensor, labels: torch.Tensor, numbers=None) -> torch.Tensor:
    logits = model(tokens, numbers=numbers)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    loss.backward()
    return loss.detach()


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    return {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}


def counts(model: Decoder) -> list[list[int]]:
    return [b.counts.tolist() for b in balances(model).values()]


def test_layers_are_dense_or_sparse_as_the_shape_says():
    every_second = ModelShape(**{**vars(SHAPE), "moe": MoEShape(4, 1, 8, every_n_layers=2)})
    names = {n.split(".moe")[0] for n, _ in model_with(every_second).named_modules() if n.endswith(".moe")}
    assert names == {"layers.1"}
    names = {n.split(".moe")[0] for n, _ in model_with().named_modules() if n.endswith(".moe")}
    assert names == {"layers.1", "layers.2"}


def test_parameter_names():
    names = {n for n, _ in model_with().named_parameters() if n.startswith("layers.2.moe")}
    assert names == {f"layers.2.moe.{n}" for n in (
        "router.gate.weight", "experts.w13", "experts.w2",
        "shared_experts.w1.weight", "shared_experts.w2.weight", "shared_experts.w3.weight")}  # fmt: skip


def test_every_assignment_is_counted_once_over_micro_batches():
    model = model_with()
    for i in range(3):
        backward(model, *batch(seed=i))
    assert [sum(c) for c in counts(model)] == [3 * 4 * 16 * 2] * 2
    assert all(int(b.tokens) == 3 * 64 for b in balances(model).values())


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("balance", ["aux_loss", "global_aux_loss"])
def test_counts_and_gradients_do_not_know_about_recomputation(mode, balance):
    keys = dict(balance=balance, aux_loss_coeff=0.5, jitter=0.1, gumbel_tau=0.5)
    plain, other = model_with(**keys), model_with(**keys)
    if mode == "selective":
        titan.SelectiveAC(titan.SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=[])).apply(other)
    else:
        for name, block in list(other.layers.named_children()):
            other.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False, early_stop=False)
    for i in range(2):
        for model in (plain, other):
            backward(model, *batch(seed=i))
    assert counts(plain) == counts(other) and sum(map(sum, counts(plain))) == 2 * 2 * 128
    for (name, mine), theirs in zip(gradients(plain).items(), gradients(other).values(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_validation_moves_neither_counts_nor_bias():
    model = model_with(balance="bias_sign")
    backward(model, *batch())
    before = counts(model)
    model.eval()
    with torch.no_grad():
        model(batch(seed=5)[0])
    assert counts(model) == before
    model.train()
    with torch.no_grad():
        model(batch(seed=6)[0])
    assert counts(model) == before, "a forward without gradients is not training, whatever the mode says"
    update_balance(model, 1)
    bias = [b.bias.clone() for b in balances(model).values()]
    model.eval()
    with torch.no_grad():
        model(batch(seed=7)[0])
    update_balance(model, 2)
    assert all(torch.equal(b.bias, old) for b, old in zip(balances(model).values(), bias, strict=True))


@pytest.mark.parametrize("rule", ["bias_sign", "bias_proportional", "quantile"])
def test_every_moe_layers_bias_moves_after_one_skewed_step(rule):
    model = model_with(balance=rule)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("gate.weight"):
                p[0] += 3.0 * p[0].norm() * torch.sign(p[0])
    backward(model, *batch())
    update_balance(model, 1)
    found = balances(model)
    assert list(found) == ["layers.1.moe.balance", "layers.2.moe.balance"]
    assert all(b.bias.any() and abs(float(b.bias.mean())) < 1e-6 for b in found.values())


@pytest.mark.parametrize("rule", ["aux_loss", "global_aux_loss", "sequence_aux_loss"])
def test_padding_is_neither_counted_nor_in_the_losses(rule):
    keys = dict(balance=rule, aux_loss_coeff=0.5, z_loss_coeff=0.1)
    tokens, labels = batch(rows=2)
    padded = torch.cat([tokens, torch.zeros(2, 16, dtype=torch.int64)])
    ignored = torch.cat([labels, torch.full((2, 16), -100)])
    short, long = model_with(**keys), model_with(**keys)
    backward(short, tokens, labels, token_numbers(labels, [0, 1]))
    backward(long, padded, ignored, token_numbers(ignored, [0, 1, -1, -1]))
    assert counts(short) == counts(long)
    for (name, mine), theirs in zip(gradients(short).items(), gradients(long).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7, msg=name)
    for a, b in zip(balances(short).values(), balances(long).values(), strict=True):
        torch.testing.assert_close(a.measured, b.measured)


def test_noise_is_the_same_in_every_split():
    keys = dict(balance="none", jitter=0.2, gumbel_tau=1.0, noise_seed=7)
    tokens, labels = batch(rows=4)
    chosen = []
    for pieces in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[2, 3], [0, 1]]):
        model, found = model_with(**keys), {}
        model.on_observation = lambda layer, seen, found=found: found.setdefault(layer, []).append(seen.experts)
        for rows in pieces:
            model(tokens[rows], numbers=token_numbers(labels[rows], [100 + r for r in rows]))
        order = [r for rows in pieces for r in rows]
        joined = torch.cat(found["1"]).view(4, 16, 2)
        chosen.append(joined[torch.argsort(torch.tensor(order))])
    assert torch.equal(chosen[0], chosen[1]) and torch.equal(chosen[0], chosen[2])


def test_experts_kernels_train_alike():
    results = []
    for experts in ("loop", "grouped_mm"):
        model = model_with(experts=experts)
        loss = backward(model, *batch())
        results.append((loss, gradients(model)))
    torch.testing.assert_close(results[0][0], results[1][0])
    for name in results[0][1]:
        torch.testing.assert_close(results[0][1][name], results[1][1][name], rtol=1e-4, atol=1e-7, msg=name)


def test_an_expert_is_drawn_from_its_own_seed():
    shape = resolve_shape(Model(name="moe", flavor="debug_moe"))
    for kind, size in (("w13", (8, 128, 384)), ("w2", (8, 128, 192))):
        name = f"layers.3.moe.experts.{kind}"
        rule = initial_value(name, shape)
        whole = draw(name, torch.Size(size), rule, 0, torch.device("cpu"))
        some = draw(name, torch.Size((4, *size[1:])), rule, 0, torch.device("cpu"))
        assert torch.equal(whole[:4], some), "an expert's weights do not depend on how many there are"
        assert not torch.equal(whole[0], whole[1])
    w13 = draw(
        "layers.3.moe.experts.w13",
        torch.Size((2, 128, 384)),
        initial_value("layers.3.moe.experts.w13", shape),
        0,
        torch.device("cpu"),
    )
    assert float(w13[..., 0::2].std()) == pytest.approx(0.02, rel=0.02)
    assert float(w13[..., 1::2].std()) == pytest.approx(0.02 / 8**0.5, rel=0.02)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="float32 experts compile to zero gradients there; config/layouts.py refuses it"
)
@pytest.mark.parametrize(
    "keys",
    [
        dict(balance="aux_loss", z_loss_coeff=1e-3),
        dict(balance="quantile", jitter=0.1),
        dict(balance="global_aux_loss", capacity="score", gumbel_tau=0.5),
        dict(balance="forced_skew", routing="expert_choice"),
    ],
)
def test_a_block_compiles_as_one_graph(keys):
    eager, compiled = model_with(**keys), model_with(**keys)
    for block in compiled.layers.values():
        block.compile(backend="aot_eager", fullgraph=True)
    losses = [backward(m, *batch()) for m in (eager, compiled)]
    torch.testing.assert_close(*losses)
    assert counts(eager) == counts(compiled)
    for (name, mine), theirs in zip(gradients(eager).items(), gradients(compiled).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7, msg=name)


def test_layers_share_one_compiled_graph():
    torch._dynamo.reset()
    model = model_with(balance="bias_sign")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True)
    model(batch()[0])
    assert len(graphs) == 2, "one for dense blocks, one for those with experts"


def test_evaluation_is_deterministic_and_a_copy_agrees():
    model = model_with(balance="bias_sign", jitter=0.1, gumbel_tau=1.0)
    twin = copy.deepcopy(model).eval()
    model.eval()
    assert torch.equal(model(batch()[0]), twin(batch()[0]))


def test_a_skewed_router_starts_unbalanced():
    skewed = ModelShape(**{**vars(SHAPE), "moe": MoEShape(8, 2, 16, initial_skew=2.0)})
    violations = []
    for shape in (SHAPE, skewed):
        model = model_with(shape)
        backward(model, *batch(rows=16))
        violations.append(max(float(b.counts.max() * 8 / b.counts.sum()) for b in balances(model).values()))
    assert violations[1] > 1.3 * violations[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "keys",
    [
        dict(balance="bias_sign"),
        dict(balance="aux_loss", z_loss_coeff=1e-3, capacity="score", jitter=0.1, gumbel_tau=0.5),
        dict(balance="quantile", quantile_preset="kimi_k3"),
        dict(balance="quantile", quantile_preset="megatron"),
    ],
)
def test_nothing_waits_for_the_device(keys):
    shape = ModelShape(**{**vars(SHAPE), "dim": 256, "moe": MoEShape(num_experts=8, top_k=2, hidden_dim=128)})
    layer = MoE(shape, Moe(**keys), noise_seed=0, layer=0).cuda().to(torch.bfloat16)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.05)
    x = torch.randn(1, 1024, 256, device="cuda").bfloat16().requires_grad_()
    numbers, gradient = torch.arange(1024, device="cuda")[None], torch.randn_like(x)

    def step() -> None:
        out, seen = layer(x, numbers)
        out.backward(gradient)
        layer.balance.count(seen)
        layer.balance.update(1, layer.balance.counts.clone(), lambda counts: counts)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
