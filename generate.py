"""Sample text from a run directory or a Hugging Face folder.

python generate.py outputs/llama_debug/RUN --prompt "def main():" --max_new_tokens 64 --temperature 0.8 --top_k 40
python generate.py HF_FOLDER --prompt "Once upon a time" "The" --num_samples 4 --seed 1

Texts go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from config.errors import ConfigError
from generation.generate import for_inference, generate
from generation.sampling import Sampling
from generation.source import Source, open_source

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", help="a run directory with checkpoints, or a Hugging Face folder")
    add("--prompt", nargs="+", required=True, help='texts to continue, as one batch; "" begins a new text')
    add("--max_new_tokens", type=int, default=128, help="most tokens of a continuation (128)")
    add("--temperature", type=float, default=1.0, help="divides the logits; 0 takes the most likely token (1)")
    add("--top_k", type=int, default=0, help="choose among so many tokens; 0: all (0)")
    add("--top_p", type=float, default=1.0, help="choose among the tokens that hold this share of probability (1)")
    add("--num_samples", type=int, default=1, help="continuations of each prompt (1)")
    add("--seed", type=int, default=0, help="of the first sample of each prompt; the next has the next seed (0)")
    add("--step", type=int, help="checkpoint of the run (the newest)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="auto: bfloat16 on a GPU, float32 on the CPU")
    add("--no_cache", action="store_true", help="run every pass over the whole text: slower, the same tokens")
    return parser.parse_args(argv)


def check(options: argparse.Namespace) -> None:
    """ConfigError: a number out of its range, or a GPU that is not there."""
    for name in ("max_new_tokens", "num_samples"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be at least 1.")
    if options.seed < 0:
        raise ConfigError(f"--seed {options.seed}: must be 0 or more.")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here. Use --device cpu.")


def check_length(source: Source, prompts: list[list[int]], max_new_tokens: int) -> None:
    """ConfigError: a text would grow longer than the model allows. A note if longer than it was trained on."""
    longest, limit = max(map(len, prompts)), source.shape.max_seq_len
    if longest >= limit:
        raise ConfigError(
            f"--prompt: {longest} tokens (the first stands for the beginning of a text), and {source.name} allows"
            f" {limit} in all (model.max_seq_len). Shorten it."
        )
    if longest + max_new_tokens > limit:
        raise ConfigError(
            f"--max_new_tokens {max_new_tokens}: with a prompt of {longest} tokens that is more than the {limit} that"
            f" {source.name} allows (model.max_seq_len). Set it to at most {limit - longest}."
        )
    if source.trained_length is not None and longest + max_new_tokens > source.trained_length:
        _say(f"Texts may grow to {longest + max_new_tokens} tokens; the run was trained on {source.trained_length}.")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Generate, and return the exit code: 0 done, 2 a mistake of the user's."""
    options = parse(argv)
    try:
        check(options)
        sampling = Sampling(options.temperature, options.top_k, options.top_p)
        source = open_source(options.source, options.step)
        prompts = [source.encode(text) for text in options.prompt]
        check_length(source, prompts, options.max_new_tokens)
        gpu = options.device != "cpu" and torch.cuda.is_available()
        device = torch.device("cuda" if gpu else "cpu")
        dtype = DTYPES["bfloat16" if gpu else "float32"] if options.dtype == "auto" else DTYPES[options.dtype]
        model = source.load(device, dtype, max(map(len, prompts)) + options.max_new_tokens)
        notes = for_inference(model)
    except ConfigError as error:
        _say(str(error))
        return 2
    _say("\n".join([f"{source.name}: {dtype} on {device}".replace("torch.", ""), *notes]))

    started = time.perf_counter()
    samples = options.num_samples
    rows = [prompt for prompt in prompts for _ in range(samples)]
    continuations = generate(
        model,
        rows,
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        seeds=[options.seed + sample for _ in prompts for sample in range(samples)],
        eos_id=source.tokenizer.eos_id,
        vocab_size=source.tokenizer.vocab_size,
        use_cache=not options.no_cache,
    )
    seconds = time.perf_counter() - started
    for row, (prompt, new) in enumerate(zip(rows, continuations, strict=True)):
        if len(rows) > 1:
            print(f"--- prompt {row // samples + 1}, sample {row % samples + 1}")
        print(source.tokenizer.decode([*prompt, *new]))
    tokens = sum(map(len, continuations))
    _say(f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} tokens/s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
