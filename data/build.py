"""From the configuration to a data pipeline."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from config.errors import ConfigError
from config.flavors import resolve_shape
from config.rules import tokenizer_kind
from config.schema import Config
from data.cache import cache_root
from data.documents import Corpus, is_held_out, text_hash
from data.loader import Slicing
from data.pipeline import DataPipeline
from data.sources import Source, open_sources
from data.stream import StreamCorpus
from data.tokenizers import ByteTokenizer, Tokenizer, check_vocabulary, load_file_tokenizer, train_bpe

BPE_TRAINING_BYTES = 8_000_000
"""Text a BPE is trained on: enough for a few thousand merges, and seconds of work whatever the corpus."""


def build_data(config: Config, *, dp_rank: int, dp_degree: int, pin_memory: bool = False) -> DataPipeline:
    """The data of one rank.

    Args:
        dp_rank, dp_degree: place among the ranks that read different data (replicate x shard).
        pin_memory: page-locked batches; set the CUDA device before the first step.

    Raises:
        ConfigError: data that is missing, empty, unreadable or does not fit the model, before anything is written.

    The first call for a corpus trains its BPE and tokenises it into ``data.cache_dir``; the ranks of a machine wait for
    the one that does. Later calls hash the files that have changed and map the result into memory.
    """
    training = config.training
    global_batch_size = training.global_batch_size
    if global_batch_size == -1:
        global_batch_size = training.local_batch_size * dp_degree
    slicing = Slicing(training.seq_len, training.local_batch_size, global_batch_size, dp_rank, dp_degree)
    given = _given_tokenizer(config)
    sources = open_sources(config.data)
    tokenizer = given or _corpus_bpe(config, sources)
    for source in sources:
        source.open_store(tokenizer, config.data.holdout_percent, cache_root(config.data.cache_dir) / "tokens")
    pipeline = DataPipeline(config, sources, tokenizer, slicing, pin_memory)
    if config.validation.enable:
        pipeline.validation()  # a run that cannot validate should not start
    return pipeline


def _given_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer that no corpus decides; None for a BPE. Its size, or the one a BPE may reach, fits the model's
    vocabulary: this is found before a corpus is opened."""
    size = config.data.tokenizer_vocab_size
    model_size = resolve_shape(config.model).vocab_size
    kind = tokenizer_kind(config)
    if kind == "bpe":
        check_vocabulary(size, model_size, f", or data.tokenizer_vocab_size to at most {model_size}")
        return None
    tokenizer = ByteTokenizer() if kind == "bytes" else load_file_tokenizer(config.model.hf_assets_path)
    check_vocabulary(tokenizer.vocab_size, model_size, "")
    return tokenizer


def _corpus_bpe(config: Config, sources: list[Source]) -> Tokenizer:
    """The BPE of the corpus: from the cache, else trained on a sample of each source by its weight."""
    data = config.data
    total = sum(source.weight for source in sources)
    key = (data.holdout_percent, BPE_TRAINING_BYTES, *((s.fingerprint, s.weight) for s in sources))

    def texts() -> Iterator[str]:
        for source in sources:
            yield from bpe_sample(source.corpus, BPE_TRAINING_BYTES * source.weight / total, data.holdout_percent)

    return train_bpe(texts(), data.tokenizer_vocab_size, cache_root(data.cache_dir) / "tokenizers", key)


def bpe_sample(corpus: Corpus, size: float, holdout_percent: float) -> list[str]:
    """About ``size`` bytes of training text: the documents with the smallest text hashes, or a stream's first ones.

    The choice depends on the texts alone, and costs one pass and ``size`` of memory.

    Raises:
        ConfigError: the corpus has no training document.
    """
    kept: list[tuple[int, str]] = []  # a heap with the largest hash on top
    total = 0
    for document in corpus.documents():
        hash64 = text_hash(document)
        if is_held_out(hash64, holdout_percent):
            continue
        heapq.heappush(kept, (-hash64, document.text))
        total += len(document.text.encode())
        if isinstance(corpus, StreamCorpus):
            if total >= size:
                break
            continue
        while total - (largest := len(kept[0][1].encode())) >= size:
            heapq.heappop(kept)
            total -= largest
    if not kept:
        raise ConfigError(f"{corpus.key}: the corpus is empty: no training document has text in it")
    return [text for _, text in sorted(kept, reverse=True)]
