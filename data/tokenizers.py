"""Text to token ids and back: plain bytes, a BPE trained on the corpus, or a tokenizer.json.

Documents are joined by one end-of-document token. ``bytes`` and ``bpe`` have it as their only special token,
``<|endoftext|>``, and it serves as bos too, as in GPT-2. Special tokens spelled out in a document are encoded as the
characters they are, so no text can end a document.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from config.errors import ConfigError
from data.cache import build_once
from data.documents import digest

logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt")


class Tokenizer(Protocol):
    """What the data pipeline and the trainer ask of a tokenizer."""

    vocab_size: int
    """One more than the largest id."""
    bos_id: int
    eos_id: int
    fingerprint: str
    """Hex sha256 of everything that decides the ids."""
    token_bytes: np.ndarray
    """(vocab_size,) int64: UTF-8 bytes of text a token stands for, 0 for special tokens."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without bos or eos."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """``encode`` of many texts at once, as int64 arrays."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens; a character cut in two becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the text in UTF-8, 256 is the end of a document."""

    vocab_size = 257
    bos_id = eos_id = 256
    fingerprint = digest("bytes", 1)
    token_bytes = np.array([1] * 256 + [0], dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class RustBackedTokenizer:
    """A tokenizer of the ``tokenizers`` library with a known end-of-document token."""

    def __init__(
        self, rust: RustTokenizer, *, bos_id: int, eos_id: int, fingerprint: str, folder: Path | None = None
    ) -> None:
        rust.encode_special_tokens = True  # "<|endoftext|>" in a document is text
        self.rust = rust
        self.folder = folder
        """Where its files are, if it was read from files."""
        self.bos_id, self.eos_id, self.fingerprint = bos_id, eos_id, fingerprint
        vocabulary = rust.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        special = {i for i, token in rust.get_added_tokens_decoder().items() if token.special} | {bos_id, eos_id}
        byte_level = "ByteLevel" in json.dumps([json.loads(rust.to_str()).get(k) for k in ("pre_tokenizer", "decoder")])
        self.token_bytes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in vocabulary.items():
            if i not in special:
                self.token_bytes[i] = len(token) if byte_level else _plain_token_bytes(token)

    def encode(self, text: str) -> list[int]:
        return self.rust.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self.rust.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, dtype=np.int64) for e in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return self.rust.decode(list(ids), skip_special_tokens=True)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of the text with what its tokenizer.json puts around it, such as a bos."""
        return self.rust.encode(text, add_special_tokens=True).ids


def _plain_token_bytes(token: str) -> int:
    """Bytes of a token that is not in the byte-level alphabet: exact for SentencePiece pieces and whole words."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.removeprefix("##").replace("\u2581", " ").encode())


def load_file_tokenizer(folder: str, key: str = "") -> RustBackedTokenizer:
    """The tokenizer of ``model.hf_assets_path``, with bos and eos as torchtitan infers them from tokenizer_config.json.

    Args:
        key: what a message begins with, if the folder is not the one of that key.

    Raises:
        ConfigError: the folder or its files are missing or unreadable, or no token ends a document.
    """
    key = key or f"model.hf_assets_path = {folder!r}"
    if not folder:
        raise ConfigError('data.tokenizer = "file" needs model.hf_assets_path, the folder with tokenizer.json')
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"{key}: no such folder; it must hold tokenizer.json and tokenizer_config.json")
    from titan import HuggingFaceTokenizer

    try:
        loaded = HuggingFaceTokenizer(tokenizer_path=str(root))
    except Exception as error:  # the tokenizers library raises plain Exception for a file it cannot parse
        raise ConfigError(f"{key}: {error}") from None
    if loaded.eos_id is None:
        raise ConfigError(f'{key}: no "eos_token" in tokenizer_config.json; documents are joined by it: name it there')
    present = [name for name in TOKENIZER_FILES if (root / name).exists()]
    files = [(name, hashlib.sha256((root / name).read_bytes()).hexdigest()) for name in present]
    bos_id = loaded.eos_id if loaded.bos_id is None else loaded.bos_id
    fingerprint = digest("file", files)
    return RustBackedTokenizer(
        loaded.tokenizer, bos_id=bos_id, eos_id=loaded.eos_id, fingerprint=fingerprint, folder=root
    )


def train_bpe(texts: Iterable[str], vocab_size: int, cache: Path, key: tuple[Any, ...]) -> RustBackedTokenizer:
    """A byte-level BPE with GPT-2's word pattern, from ``cache``, else trained on ``texts`` and stored there.

    ``texts`` is read only if the tokenizer is not cached. ``vocab_size`` counts the 256 bytes and the special token; a
    short text may give fewer. The same texts give the same merges.
    """

    def build(folder: Path) -> None:
        started = time.perf_counter()
        rust = RustTokenizer(models.BPE())
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        rust.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        rust.train_from_iterator(texts, trainer)
        rust.save(str(folder / "tokenizer.json"))
        logger.info("Trained a BPE of %d tokens in %.1f s", rust.get_vocab_size(), time.perf_counter() - started)

    folder = build_once(cache / digest("bpe", vocab_size, key), build)
    rust = RustTokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads(rust.to_str())["model"]
    fingerprint = digest("bpe", sorted(model["vocab"].items()), model["merges"])
    eos_id = model["vocab"][END_OF_TEXT]
    return RustBackedTokenizer(rust, bos_id=eos_id, eos_id=eos_id, fingerprint=fingerprint)


def check_vocabulary(tokenizer_size: int, model_size: int, fix: str) -> None:
    """Refuse a tokenizer whose ids do not all have a row in the embedding.

    Raises:
        ConfigError: ``tokenizer_size`` > ``model_size``, with both numbers.
    """
    if tokenizer_size > model_size:
        raise ConfigError(
            f"model.vocab_size = {model_size}: smaller than the tokenizer's {tokenizer_size} tokens; "
            f"set model.vocab_size to at least {tokenizer_size}{fix}"
        )
