"""What the peers read: the text and the tokenizer of our runs for torchtitan, our very tokens for transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.side import Job
from config.load import load_file
from data.build import build_data
from data.sources import open_sources
from data.tokenizer_files import save_tokenizer

TEXT_CHARACTERS = 40_000_000
"""What torchtitan gets: more than it reads, and quickly loaded."""


def text_and_tokenizer(job: Job) -> Path:
    """A working folder for torchtitan, made once a job: its ``c4_test`` data set is our text, its tokenizer ours."""
    folder = job.work / "torchtitan"
    assets = folder / "tests" / "assets"
    if assets.exists():
        return folder
    (assets / "c4_test").mkdir(parents=True)
    written = 0
    with open(assets / "c4_test" / "data.json", "w", encoding="utf-8") as file:
        for source in open_sources(job.config.data):
            for document in source.corpus.documents():
                written += file.write(json.dumps({"text": document.text}) + "\n")
                if written > TEXT_CHARACTERS:
                    break
    pipeline = build_data(job.config, dp_rank=0, dp_degree=1)
    save_tokenizer(pipeline.tokenizer, assets / "tokenizer")
    pipeline.close()
    return folder


def token_file(job: Job) -> Path:
    """What our run of the job trains on, made once a job: int32 (steps, 2, G, S), tokens and labels.

    G sequences of a step in their global order: that of micro-batch a, rank r, row b is (a x ranks + r) x batch + b.
    """
    path = job.work / "tokens.npy"
    if path.exists():
        return path
    training = job.config.training
    sequences = job.workload.sequences * job.ngpu
    overrides = {"training.local_batch_size": sequences, "training.global_batch_size": sequences}
    pipeline = build_data(load_file(job.config.job.config_file, overrides).config, dp_rank=0, dp_degree=1)
    tokens = np.empty((job.steps, 2, sequences, training.seq_len), dtype=np.int32)
    for step in range(job.steps):
        batch = pipeline.train.next_step().micro_batches[0]
        tokens[step, 0], tokens[step, 1] = batch.tokens.numpy(), batch.labels.numpy()
    pipeline.close()
    np.save(path, tokens)
    return path
