"""A tokenizer written to files reads back to the same ids, here and in transformers."""

import json
from pathlib import Path

import pytest

from data.tokenizer_files import save_tokenizer
from data.tokenizers import ByteTokenizer, Tokenizer, load_file_tokenizer, train_bpe
from tests.data.generated import generated_texts

TRICKY = ["", "plain", "naïve — 🙂\n\ttabs  and   runs", "\x00\x7f", *generated_texts(3, seed=1)]


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    return train_bpe(iter(generated_texts(50)), 320, tmp_path / "cache", ("test",))


def test_the_files_give_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    read = load_file_tokenizer(str(tmp_path / "tokenizer"))
    assert (read.vocab_size, read.bos_id, read.eos_id) == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    assert read.token_bytes.tolist() == tokenizer.token_bytes.tolist()
    for text in [*TRICKY, "<|endoftext|> spelled out"]:
        ids = tokenizer.encode(text)
        assert read.encode(text) == ids and read.decode([*ids, read.eos_id]) == text
        assert read.encode_prompt(text) == [tokenizer.eos_id, *ids], "a text follows the end of another, as in training"


def test_transformers_reads_the_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert read.eos_token_id == read.bos_token_id == tokenizer.eos_id
    for text in TRICKY:
        assert read.encode(text, add_special_tokens=False) == tokenizer.encode(text)
        assert read.decode(tokenizer.encode(text)) == text


def test_files_are_copied_as_they_are(tmp_path: Path) -> None:
    original, copy = tmp_path / "assets", tmp_path / "tokenizer"
    save_tokenizer(train_bpe(iter(generated_texts(50)), 320, tmp_path / "cache", ("test",)), original)
    (original / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|endoftext|>", "chat_template": "{{x}}"})
    )
    (original / "special_tokens_map.json").write_text("{}")
    (original / "model.safetensors").write_text("no part of it")
    read = load_file_tokenizer(str(original))
    save_tokenizer(read, copy)
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
        p.name: p.read_bytes() for p in original.iterdir() if p.name != "model.safetensors"
    }
    assert load_file_tokenizer(str(copy)).fingerprint == read.fingerprint
