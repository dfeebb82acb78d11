"""One MoE block on one GPU: are the kernels right, how fast are they, and how do they stand beside torchtitan 0.2.2's
block?

    python -m benchmarks.moe_block --peer_path SITE --out moe_block.json

``--peer_path`` is a folder that holds torchtitan 0.2.2; without it the peer is left out. Every variant gets the same
bfloat16 weights and input and routes the same way. Times are CUDA events around forward and backward, taken in rounds
that alternate between variants, so that a clock that drifts hits all of them. Memory is what one forward and backward
allocates beyond weights and input, at its peak. A variant that fails is reported, and the rest goes on.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import peak_gib, time_ms
from config.schema import Moe
from config.shapes import ModelShape, MoEShape
from model.experts import KERNELS, loop_experts
from model.moe import MoE

_plain_peer_products: dict[str, Any] = {}


def our_block(shape: ModelShape, compiled: bool, **keys: Any) -> torch.nn.Module:
    """Our layer with bfloat16 weights on the GPU, drawn from one seed."""
    block = MoE(shape, Moe(balance="bias_sign", **keys), noise_seed=0, layer=0)  # the peer's rule
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    block = block.cuda().to(torch.bfloat16)
    if compiled:
        block.compile(fullgraph=True)
    return block


def peer_block(shape: ModelShape, ours: MoE, compiled: bool) -> torch.nn.Module:
    """torchtitan's layer with our weights; ``compiled`` as in its trainer: router, reorderer and expert products."""
    from torchtitan.models.moe import MoE as PeerMoE
    from torchtitan.models.moe import MoEArgs, moe

    assert shape.moe is not None
    arguments = MoEArgs(
        num_experts=shape.moe.num_experts,
        num_shared_experts=0,
        top_k=shape.moe.top_k,
        score_func="softmax",
        route_norm=False,
        score_before_experts=False,
    )
    with torch.device("cuda"):
        peer = PeerMoE(arguments, dim=shape.dim, hidden_dim=shape.moe.hidden_dim).to(torch.bfloat16)
    peer.expert_bias, peer.tokens_per_expert = peer.expert_bias.float().zero_(), peer.tokens_per_expert.float().zero_()
    with torch.no_grad():
        peer.router.gate.weight.copy_(ours.router.gate.weight)
        peer.experts.w1.copy_(ours.experts.w13[..., 0::2].transpose(1, 2))
        peer.experts.w3.copy_(ours.experts.w13[..., 1::2].transpose(1, 2))
        peer.experts.w2.copy_(ours.experts.w2)
    products = _plain_peer_products.setdefault("products", moe._run_experts_grouped_mm)
    if compiled:
        torch._dynamo.config.capture_scalar_outputs = True
        for name in ("router", "reorderer"):
            setattr(peer, name, torch.compile(getattr(peer, name), fullgraph=True))
        products = torch.compile(products, fullgraph=True)
    # The peer calls a global of its module: give it the one of this variant at each call.
    peer.register_forward_pre_hook(lambda *_: setattr(moe, "_run_experts_grouped_mm", products))
    return peer


def output_of(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layer's output; ours returns what it counted beside it."""
    out = block(x)
    return out[0] if isinstance(out, tuple) else out


def forward_backward(block: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> None:
    """One pass in both directions; gradients are made anew, as after zero_grad(set_to_none=True)."""
    x.grad = None
    block.zero_grad(set_to_none=True)
    output_of(block, x).backward(grad)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b| in L2."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def kernel_errors(name: str, tokens: int, moe: MoEShape, dim: int, hot: int | None) -> dict[str, float]:
    """Error of an expert kernel, output and every gradient, against the loop in float32.

    Args:
        hot: tokens go to these first experts alone, so that the others must get exactly zero gradients; memory is
            poisoned with NaN meanwhile. None: any expert.
    """
    generator = torch.Generator().manual_seed(1)
    score = torch.rand(tokens, moe.num_experts, generator=generator)
    if hot is not None:
        score[:, hot:] -= 1.0
    experts = score.topk(moe.top_k).indices.cuda()
    weights = torch.rand(tokens, moe.top_k, generator=generator).cuda()
    x = torch.randn(tokens, dim, generator=generator).cuda()
    w13 = (torch.randn(moe.num_experts, dim, 2 * moe.hidden_dim, generator=generator) * dim**-0.5).cuda()
    w2 = (torch.randn(moe.num_experts, dim, moe.hidden_dim, generator=generator) * moe.hidden_dim**-0.5).cuda()
    grad = torch.randn(tokens, dim, generator=generator).cuda()

    def run(kernel: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        # bfloat16 values in both, so that the difference is the kernel's.
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in (x, w13, w2)]
        weight = weights.clone().requires_grad_()
        out = kernel(leaves[0], experts, weight, leaves[1], leaves[2], None)
        out.backward(grad.bfloat16().to(dtype))
        return [out.detach(), leaves[0].grad, weight.grad, leaves[1].grad, leaves[2].grad]

    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty with NaN
    try:
        found = run(KERNELS[name], torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    exact = run(loop_experts, torch.float32)
    names = ("out", "x", "weights", "w13", "w2")
    errors = {n: relative(a, b) for n, a, b in zip(names, found, exact, strict=True)}
    if hot is not None:
        errors["nonzero in unused experts"] = float(sum(int(g[hot:].ne(0).sum()) for g in found[3:]))
    return errors


def large_rows_errors() -> dict[str, float]:
    """grouped_mm at 525,312 rows of 4096, more than 2^31 elements (torchtitan #1932): output and every gradient against
    the loop, whose products stay far below that size.
    """
    tokens, dim, hidden, experts = 65_664, 4096, 256, 16
    generator = torch.Generator(device="cuda").manual_seed(2)
    x = torch.randn(tokens, dim, device="cuda", generator=generator).bfloat16()
    w13 = (torch.randn(experts, dim, 2 * hidden, device="cuda", generator=generator) * dim**-0.5).bfloat16()
    w2 = (torch.randn(experts, dim, hidden, device="cuda", generator=generator) * hidden**-0.5).bfloat16()
    ids = torch.rand(tokens, experts, device="cuda", generator=generator).topk(8).indices
    weights = torch.rand(tokens, 8, device="cuda", generator=generator)
    grad = torch.randn(x.shape, device="cuda", generator=generator).bfloat16()

    def run(name: str) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weights, w13, w2)]
        out = KERNELS[name](leaves[0], ids, leaves[1], leaves[2], leaves[3], None)
        out.backward(grad)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    names = ("out", "x", "weights", "w13", "w2")
    return {n: relative(a, b) for n, a, b in zip(names, run("grouped_mm"), run("loop"), strict=True)}


def attempt(report: dict[str, Any], name: str, work: Callable[[], Any]) -> Any:
    """Run ``work``; its result, or None with the error in the report."""
    try:
        return work()
    except Exception as error:
        report.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:2000]
        traceback.print_exc()
        torch.cuda.empty_cache()
        return None


def main() -> None:
    """Measure, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer_path", type=Path, help="folder that holds torchtitan 0.2.2")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "moe_block.json")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--top_k", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.peer_path:
        sys.path.insert(0, str(arguments.peer_path))
    moe = MoEShape(num_experts=arguments.experts, top_k=arguments.top_k, hidden_dim=arguments.hidden)
    dim = arguments.dim
    shape = ModelShape(
        vocab_size=1, dim=dim, n_layers=1, n_heads=1, n_kv_heads=1, hidden_dim=1, max_seq_len=arguments.tokens, moe=moe
    )
    report: dict[str, Any] = {
        "command": sys.argv,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": {k: v for k, v in vars(arguments).items() if isinstance(v, int)},
        "errors against the float32 loop": {},
        "variants": {},
    }

    for kernel in ("loop", "grouped_mm", "quack"):
        for case, hot in (("any expert", None), (f"the first {moe.top_k} experts only", moe.top_k)):
            found = attempt(
                report, f"{kernel}, {case}", lambda kernel=kernel, hot=hot: kernel_errors(kernel, 2048, moe, dim, hot)
            )
            if found is not None:
                report["errors against the float32 loop"][f"{kernel}, {case}"] = found
                print(f"{kernel}, {case}:", {k: f"{v:.1e}" for k, v in found.items()}, flush=True)
    report["errors of 525,312 rows x 4096"] = attempt(report, "large rows", large_rows_errors)
    torch.cuda.empty_cache()

    generator = torch.Generator(device="cuda").manual_seed(3)
    x = torch.randn(1, arguments.tokens, dim, device="cuda", generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(x.shape, device="cuda", generator=generator).bfloat16()
    makers: dict[str, Callable[[], torch.nn.Module]] = {
        "grouped_mm": lambda: our_block(shape, compiled=False),
        "grouped_mm, compiled": lambda: our_block(shape, compiled=True),
        "grouped_mm, compiled, bfloat16 router": lambda: our_block(shape, compiled=True, router_dtype="bfloat16"),
        "quack": lambda: our_block(shape, compiled=False, experts="quack"),
        "quack, compiled": lambda: our_block(shape, compiled=True, experts="quack"),
    }
    if arguments.peer_path:
        plain = our_block(shape, compiled=False)
        makers["torchtitan"] = lambda: peer_block(shape, plain, compiled=False)
        makers["torchtitan, compiled"] = lambda: peer_block(shape, plain, compiled=True)
    flops = 6 * arguments.tokens * (moe.top_k * 3 * dim * moe.hidden_dim + dim * moe.num_experts)
    blocks, times, reference = {}, {}, None
    for name, make in makers.items():

        def prepare(make: Callable[[], torch.nn.Module] = make) -> torch.nn.Module:
            block = make()
            for _ in range(3):
                forward_backward(block, x, grad)
            torch.cuda.synchronize()
            return block

        block = attempt(report, name, prepare)
        if block is None:
            continue
        with torch.no_grad():
            out = output_of(block, x)
        reference = out if reference is None else reference
        x.grad = None
        block.zero_grad(set_to_none=True)
        memory = peak_gib(functools.partial(forward_backward, block, x, grad))
        report["variants"][name] = {"peak_gib": memory, "output_difference": relative(out, reference)}
        blocks[name], times[name] = block, []
        block.zero_grad(set_to_none=True)
        print(f"ready: {name}", flush=True)
    for turn in range(arguments.rounds):
        for name in list(blocks)[:: 1 if turn % 2 == 0 else -1]:
            call = functools.partial(forward_backward, blocks[name], x, grad)
            measured = attempt(report, name, functools.partial(time_ms, call, arguments.repeats))
            times[name] += measured[2:] if measured else []
            blocks[name].zero_grad(set_to_none=True)
    peers = [statistics.median(times[n]) for n in times if n.startswith("torchtitan") and times[n]]
    for name, taken in times.items():
        if taken:
            median = statistics.median(taken)
            row = report["variants"][name]
            row |= {"ms": median, "tflops": flops / median / 1e9, "times_ms": taken}
            row["against the best torchtitan"] = min(peers) / median if peers else None
            ratio = f"  {min(peers) / median:.2f} x torchtitan" if peers else ""
            print(f"{name:40} {median:7.2f} ms {row['tflops']:6.0f} TFLOP/s {row['peak_gib']:6.2f} GiB{ratio}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {arguments.out}")


if __name__ == "__main__":
    main()
