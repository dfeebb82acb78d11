"""Prompts in, continuations out, a token at a time, with a key-value cache or without: the tokens are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from config.errors import ConfigError
from generation.sampling import Sampling, choose
from model.decoder import Decoder
from model.experts import KERNELS
from model.kv_cache import cached
from model.moe import MoE

PADDING = -1
"""Document id of what stands before the shorter prompts of a batch."""


class Inputs(NamedTuple):
    """Arguments of a decoder's forward pass, each (B, S)."""

    tokens: torch.Tensor
    positions: torch.Tensor
    document_ids: torch.Tensor | None
    numbers: torch.Tensor | None

    def columns(self, start: int, end: int) -> dict[str, torch.Tensor | None]:
        """The part from column ``start`` to ``end``, as keyword arguments."""
        return {name: None if x is None else x[:, start:end] for name, x in self._asdict().items()}


def for_inference(model: Decoder) -> list[str]:
    """Make ``model`` say of each token what it says whatever else is in the pass, and return what that changed.

    A pass of a cached generation holds one token of a sequence, so nothing may depend on how many there are: experts
    have no capacity and drop nothing.

    Raises:
        ConfigError: experts choose tokens, later ones included: such a model has no next token.
    """
    model.eval()
    notes = {}
    for layer in (module for module in model.modules() if isinstance(module, MoE)):
        moe, parameter = layer.router.moe, layer.experts.w13
        if moe.routing == "expert_choice":
            raise ConfigError(
                'moe.routing = "expert_choice": experts choose among all tokens of a pass, later ones too, so there is'
                ' no next token to generate. Train with moe.routing = "token_choice".'
            )
        if moe.capacity != "none":
            layer.router.moe = dataclasses.replace(moe, capacity="none")
            notes["capacity"] = f'Experts drop no token here; in training moe.capacity was "{moe.capacity}".'
        if moe.experts == "quack" and (parameter.device.type, parameter.dtype) != ("cuda", torch.bfloat16):
            layer.experts.compute = KERNELS["grouped_mm"]
            notes["experts"] = 'moe.experts = "quack" runs in bfloat16 on CUDA: experts run as "grouped_mm" here.'
    return list(notes.values())


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    eos_id: int | None = None,
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """Continue each prompt until ``eos_id`` or for ``max_new_tokens``.

    A row's tokens depend on its prompt and its seed, not on the other rows.

    Args:
        model: see :func:`for_inference`; its rotary table has a row for every token.
        prompts: B lists of token ids, none empty.
        seeds: B seeds of the draws.
        vocab_size: ids from here on, which no tokenizer has, are never chosen.
        use_cache: False runs every pass over the whole sequence.

    Returns:
        B lists of new ids, without ``eos_id``.
    """
    device, batch = model.rope.device, len(prompts)
    prompt_length = max(map(len, prompts))
    length = prompt_length + max_new_tokens
    inputs = _inputs(prompts, length, device, numbered=model.shape.moe is not None)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    going = torch.ones(batch, dtype=torch.bool, device=device)
    done = end = prompt_length
    with cached(model, length) if use_cache else nullcontext(), _last_token_only(model):
        for end in range(prompt_length, length):
            start = 0 if not use_cache or end == prompt_length else end - 1
            logits = model(**inputs.columns(start, end))[:, -1]
            draws = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in generators])
            inputs.tokens[:, end] = choose(logits[:, :vocab_size], sampling, draws)
            done = end + 1
            if eos_id is not None:
                going &= inputs.tokens[:, end] != eos_id
                if not going.any():
                    break
    new = inputs.tokens[:, prompt_length:done].tolist()
    return [ids[: ids.index(eos_id)] if eos_id in ids else ids for ids in new]


def _inputs(prompts: Sequence[Sequence[int]], length: int, device: torch.device, *, numbered: bool) -> Inputs:
    """Everything a pass over all ``length`` columns would be given; new tokens are zeros still."""
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)[:, None]  # (B, 1)
    tokens = torch.zeros(len(prompts), length, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) : longest] = torch.tensor(prompt, device=device)
    column = torch.arange(length, device=device)
    padded = column < padding  # (B, length)
    positions = (column - padding).clamp(min=0)
    document_ids = torch.where(padded, PADDING, 0).int() if padding.any() else None
    numbers = torch.where(padded, -1 - positions, positions) if numbered else None
    return Inputs(tokens, positions, document_ids, numbers)


@contextmanager
def _last_token_only(model: Decoder) -> Any:
    """The head sees the last token of a pass: logits of a long prompt are large, and nothing is asked of them."""
    assert model.output is not None
    hook = model.output.register_forward_pre_hook(lambda module, arguments: (arguments[0][:, -1:],))
    try:
        yield
    finally:
        hook.remove()
