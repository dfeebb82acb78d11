"""Llama or OLMoE of transformers under FSDP2: what a user of AutoModel who writes the loop trains with.

    torchrun --nproc_per_node N benchmarks/transformers_peer.py SPECIFICATION.json

The specification (benchmarks/side_transformers.py) names a file of tokens, the model, and how to train it. Weights are
float32, sharded by fully_shard, a unit a layer; compute is in the given dtype through MixedPrecisionPolicy; AdamW is
fused. Prints one line of JSON with the time of every step, the losses and the peak memory of the first rank.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

PREFIX = "_checkpoint_wrapped_module."


def build(spec: dict[str, Any], device: torch.device) -> torch.nn.Module:
    """The model with its initial weights: checkpointing, then compile, then FSDP2, as torchtitan orders them."""
    from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "olmoe": (OlmoeConfig, OlmoeForCausalLM)}
    config_class, model_class = kinds[spec["family"]]
    config = config_class(**spec["config"])
    config._attn_implementation = spec["attention"]
    if spec["family"] == "olmoe":
        config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model = model_class(config)
    layers = model.model.layers
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, spec["dtype"]), reduce_dtype=torch.float32)
    for i, layer in enumerate(list(layers)):
        if spec["compile"]:
            layer.forward = torch.compile(layer.forward)  # within FSDP2's hooks
        if spec["checkpoint"]:
            layers[i] = checkpoint_wrapper(layer, preserve_rng_state=False)
        fully_shard(layers[i], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    with torch.device(device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table was on the meta device
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            draw(name.replace(PREFIX, ""), parameter.to_local(), config.hidden_size)
    return model.train()


def draw(name: str, parameter: torch.Tensor, dim: int) -> None:
    """Fill this rank's share with normal values, of the standard deviation that our parameter of the same place has
    (model/initial_weights.py).
    """
    layer = re.search(r"layers\.(\d+)\.", name)
    narrow = 0.02 / (2 * (int(layer[1]) + 1)) ** 0.5 if layer else 0.0
    if name.endswith("norm.weight"):
        torch.nn.init.ones_(parameter)
    elif name == "model.embed_tokens.weight":
        parameter.normal_(0.0, 1.0)
    elif name == "lm_head.weight":
        parameter.normal_(0.0, dim**-0.5)
    elif name.endswith("experts.gate_up_proj"):
        gate, up = parameter.chunk(2, dim=1)
        gate.normal_(0.0, 0.02)
        up.normal_(0.0, narrow)
    elif re.search(r"(o_proj|down_proj|up_proj)(\.weight)?$", name):
        parameter.normal_(0.0, narrow)
    else:
        parameter.normal_(0.0, 0.02)


def train(spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Run every step; seconds of each, and the mean loss of each over all ranks in nats."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(spec, device)
    mean_loss = functools.partial(model.loss_function, labels=None, vocab_size=spec["config"]["vocab_size"])
    if spec["compile"]:
        mean_loss = functools.partial(torch.compile(mean_loss.func), **mean_loss.keywords)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=tuple(spec["betas"]),
        eps=spec["eps"],
        weight_decay=spec["weight_decay"],
        fused=True,
    )
    everything = np.load(spec["tokens"], mmap_mode="r")
    steps, batch, accumulation = len(everything), spec["batch"], spec["accumulation"]
    rows = [(a * ranks + rank) * batch + b for a in range(accumulation) for b in range(batch)]
    tokens = torch.from_numpy(everything[:, :, rows]).to(device)  # at once: no step waits for a copy
    losses, marks = [], [mark(device)]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = spec["learning_rates"][step]
        total = torch.zeros((), device=device)
        for part in tokens[step].long().split(batch, dim=1):
            loss = mean_loss(model(input_ids=part[0]).logits, shift_labels=part[1].contiguous()) / accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        marks.append(mark(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    summed = torch.stack(losses)
    dist.all_reduce(summed)
    peak = torch.cuda.max_memory_reserved() / 1024**3 if device.type == "cuda" else None
    return {
        "step_times_s": [between(a, b) for a, b in zip(marks, marks[1:], strict=False)],
        "losses": {step: value for step, value in enumerate((summed / ranks).tolist(), start=1)},
        "reserved_gib": peak,
    }


def mark(device: torch.device) -> Any:
    """A moment: an event on the GPU's stream, which nobody waits for, or a reading of the clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a: Any, b: Any) -> float:
    """Seconds from one mark to the next."""
    return b - a if isinstance(a, float) else a.elapsed_time(b) / 1000


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    device = torch.device("cpu")
    if spec["device"] == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(spec["seed"] + dist.get_rank())  # each rank draws its own share of every weight
    result = train(spec, device)
    if dist.get_rank() == 0:
        print(f"transformers_peer: {json.dumps(result)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
