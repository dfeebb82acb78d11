"""A run's tokenizer as files: what is needed to read its weights again, also where its corpus or cache is not.

Tokenizers read from files are copied as they are. ``bytes`` and ``bpe`` become a tokenizer.json and a
tokenizer_config.json that the ``tokenizers`` library, transformers and ``model.hf_assets_path`` read. There a text is
preceded by the end-of-document token, as a document is in training.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from data.tokenizers import END_OF_TEXT, TOKENIZER_FILES, ByteTokenizer, RustBackedTokenizer, Tokenizer

COMPANIONS = (
    "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Copied too, though they decide no id here."""


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of ``tokenizer`` into ``folder``, which may exist."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, RustBackedTokenizer) and tokenizer.folder is not None:
        for name in (*TOKENIZER_FILES, *COMPANIONS):
            if (tokenizer.folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, folder / name)
        return
    if isinstance(tokenizer, ByteTokenizer):
        rust = byte_level_tokenizer()
    else:
        assert isinstance(tokenizer, RustBackedTokenizer)
        rust = RustTokenizer.from_str(tokenizer.rust.to_str())
    rust.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A $B:1",
        special_tokens=[(END_OF_TEXT, tokenizer.eos_id)],
    )
    rust.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def byte_level_tokenizer() -> RustTokenizer:
    """:class:`data.tokenizers.ByteTokenizer` for the ``tokenizers`` library: a byte-level BPE without merges."""
    rust = RustTokenizer(models.BPE(vocab={_letter(byte): byte for byte in range(256)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([END_OF_TEXT])
    return rust


def _letter(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies (GPT-2): itself if it prints, else one of those
    from U+0100 on, in order.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printing:
        return chr(byte)
    return chr(0x100 + sum(b not in printing for b in range(byte)))
