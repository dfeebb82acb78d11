"""Does a fresh router spread tokens evenly? Counts on four inputs, with statistics that can fire.

    python -m benchmarks.routing_check --config train_configs/debug_moe.toml

Inputs: ``gaussian`` (what an ideal router spreads), ``real`` (what the routers of the untrained model see on text of
the corpus), ``zero`` (every logit equal: the top-k takes the same experts for all) and ``adversarial`` (every token
points at one expert). An even load stays below three times the violation that chance alone gives, or 0.5; a collapsed
one has no more than one and a half times k effective experts. Exits with 1 if ``gaussian`` or ``real`` is collapsed, or
``zero`` or ``adversarial`` is not: then the check itself is broken.
"""

import argparse
import sys
from dataclasses import dataclass

import torch

from config.errors import ConfigError
from config.flavors import resolve_shape
from config.load import load_file
from config.seeds import seeds
from data.build import build_data
from model.attention import attention_backend
from model.balance import balances
from model.decoder import Decoder
from model.initial_weights import draw, initial_value
from model.load_statistics import dead_experts, effective_share, max_violation, noise_violation, variation


@dataclass(frozen=True)
class Load:
    """How evenly one input loads one layer."""

    violation: float
    noise: float
    variation: float
    effective_share: float
    dead: int
    verdict: str


def judge(counts: torch.Tensor, tokens: int, top_k: int) -> Load:
    """Statistics and verdict ("even", "skewed", "collapsed") of one layer's counts (E,)."""
    experts = counts.numel()
    violation, noise = float(max_violation(counts)), noise_violation(tokens, experts, top_k)
    share = float(effective_share(counts))
    verdict = "even" if violation <= max(3 * noise, 0.5) else "skewed"
    if share * experts <= 1.5 * top_k:
        verdict = "collapsed"
    return Load(violation, noise, float(variation(counts)), share, int(dead_experts(counts)), verdict)


@torch.no_grad()
def check_model(model: Decoder, tokens: torch.Tensor, number: int) -> dict[str, dict[str, Load]]:
    """Input -> layer -> load, for every MoE layer of ``model``.

    Args:
        tokens: int64 (B, S), text.
        number: how many tokens the made-up inputs have.
    """
    real: dict[str, torch.Tensor] = {}
    model.on_observation = lambda layer, observation: real.update({layer: observation.counts})
    model.eval()
    model(tokens)
    model.on_observation = None
    generator = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, Load]] = {"gaussian": {}, "real": {}, "zero": {}, "adversarial": {}}
    for layer, counts in real.items():
        router, balance = model.layers[layer].moe.router, model.layers[layer].moe.balance
        top_k, gate = router.shape.top_k, router.gate.weight
        inputs = {
            "gaussian": torch.randn(number, gate.shape[1], generator=generator),
            "zero": torch.zeros(number, gate.shape[1]),
            "adversarial": torch.nn.functional.normalize(gate[:1], dim=1).expand(number, -1) * gate.shape[1] ** 0.5,
        }
        for name, x in inputs.items():
            numbers, valid = torch.arange(number), torch.ones(number, dtype=torch.bool)
            routing = router(
                x, numbers, valid, balance.noise_key, balance.coefficients[2], balance.bias, balance.choose_by
            )
            found[name][layer] = judge(routing.requested.sum(0), number, top_k)
        found["real"][layer] = judge(counts, tokens.numel(), top_k)
    return found


def main(argv: list[str] | None = None) -> int:
    """Print a table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config", default="train_configs/debug_moe.toml", help="configuration of a model with experts"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the made-up inputs")
    arguments = parser.parse_args(argv)
    try:
        config = load_file(arguments.config).config
        shape = resolve_shape(config.model, config.moe)
        if shape.moe is None:
            raise ConfigError(f"{arguments.config}: flavor {config.model.flavor} has no experts to check.")
        pipeline = build_data(config, dp_rank=0, dp_degree=1)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    model = Decoder(shape, attention_backend("sdpa"), config.training.seq_len, config.moe)
    seed = seeds(config)["init_seed"]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw(name, parameter.shape, initial_value(name, shape), seed, parameter.device))
    tokens = pipeline.train.next_step().micro_batches[0].tokens
    pipeline.close()
    found = check_model(model, tokens, arguments.tokens)
    print(f"{len(balances(model))} layers, {shape.moe.num_experts} experts, top-{shape.moe.top_k}")
    print(f"{'input':12} {'layer':>5} {'MaxVio':>8} {'chance':>8} {'CV':>7} {'effective':>10} {'dead':>5}  verdict")
    for name, layers in found.items():
        for layer, load in layers.items():
            print(
                f"{name:12} {layer:>5} {load.violation:8.3f} {load.noise:8.3f} {load.variation:7.3f}"
                f" {load.effective_share:9.1%} {load.dead:5}  {load.verdict}"
            )
    bad = [
        f"{name}, layer {layer}: {load.verdict}"
        for name, layers in found.items()
        for layer, load in layers.items()
        if (load.verdict == "collapsed") == (name in ("gaussian", "real"))
    ]
    for line in bad:
        print(f"unexpected: {line}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
