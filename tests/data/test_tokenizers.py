import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from config.errors import ConfigError
from data.build import bpe_sample, build_data
from data.corpora import TextCorpus
from data.tokenizers import ByteTokenizer, RustBackedTokenizer, check_vocabulary, load_file_tokenizer, train_bpe
from tests.data.generated import generated_texts, write_jsonl

TRICKY = ["", "plain", "naïve — 🙂\n\ttabs  and   runs", "<|endoftext|> spelled out", "\x00\x7f"]


def bpe(folder: Path, texts: list[str], size: int = 320):
    return train_bpe(iter(texts), size, folder, ("test",))


def test_bytes_round_trip():
    tokenizer = ByteTokenizer()
    for text in TRICKY:
        ids = tokenizer.encode(text)
        assert ids == list(text.encode()) == tokenizer.encode_batch([text])[0].tolist()
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == 257


def test_bpe_round_trip_and_byte_lengths(tmp_path):
    tokenizer = bpe(tmp_path, generated_texts(50))
    assert tokenizer.vocab_size == 320 and tokenizer.token_bytes[tokenizer.eos_id] == 0
    for text in [*TRICKY, *generated_texts(5, seed=1)]:
        ids = tokenizer.encode(text)
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())
        assert tokenizer.encode_batch([text])[0].tolist() == ids
    assert len(tokenizer.encode("river stone")) < len("river stone")


def test_bpe_training_is_deterministic(tmp_path):
    texts = generated_texts(200)
    first, second = bpe(tmp_path / "a", texts), bpe(tmp_path / "b", texts)
    assert first.fingerprint == second.fingerprint
    files = [next((tmp_path / side).glob("*/tokenizer.json")).read_bytes() for side in "ab"]
    assert files[0] == files[1]
    assert bpe(tmp_path / "c", texts[:100]).fingerprint != first.fingerprint


def test_bpe_is_cached_and_not_read_again(tmp_path):
    first = bpe(tmp_path, generated_texts(50))

    def unread():
        raise AssertionError("the cache was not used")
        yield

    assert train_bpe(unread(), 320, tmp_path, ("test",)).fingerprint == first.fingerprint


def test_bpe_never_sees_held_out_documents(make_config, tmp_path):
    config = make_config(data__tokenizer="bpe", data__tokenizer_vocab_size=300)
    rows = [json.loads(line)["text"] for line in open(tmp_path / "corpus" / "rows.jsonl")]
    before = build_data(config, dp_rank=0, dp_degree=1)
    held_out = [document.text for document in before.held_out_documents()]
    assert held_out
    training = [text for text in rows if text not in held_out]
    assert sorted(bpe_sample(TextCorpus(config.data.path), 1e9, config.data.holdout_percent)) == sorted(training)
    more = make_config(data__tokenizer="bpe", data__tokenizer_vocab_size=300, data__holdout_percent=60.0)
    after = build_data(more, dp_rank=0, dp_degree=1)
    assert after.tokenizer.fingerprint != before.tokenizer.fingerprint, "the one in the cache has seen what is held out"


def test_bpe_sample_is_bounded_and_independent_of_order(tmp_path):
    texts = generated_texts(300)
    samples = []
    for name, order in (("a", texts), ("b", texts[::-1])):
        samples.append(bpe_sample(TextCorpus(str(write_jsonl(tmp_path / f"{name}.jsonl", order))), 5000, 5.0))
    assert samples[0] == samples[1]
    size = sum(len(text.encode()) for text in samples[0])
    assert 5000 <= size < 5500


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    """A folder as model.hf_assets_path names it, with a special token that documents are joined by."""
    trained = bpe(tmp_path / "cache", generated_texts(50))
    folder = tmp_path / "assets"
    folder.mkdir()
    trained.rust.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_file_tokenizer(tokenizer_folder):
    tokenizer = load_file_tokenizer(str(tokenizer_folder))
    assert tokenizer.vocab_size == 321  # <|begin|> was added
    assert (tokenizer.bos_id, tokenizer.eos_id) == (320, 0)
    assert tokenizer.token_bytes[[0, 320]].tolist() == [0, 0]
    for text in [*TRICKY, "<|begin|>"]:
        ids = tokenizer.encode(text)
        assert not {0, 320} & set(ids) and tokenizer.decode(ids) == text
        assert tokenizer.token_bytes[ids].sum() == len(text.encode())


def test_file_tokenizer_is_chosen_by_auto(tokenizer_folder, make_config):
    config = make_config(data__tokenizer="auto", model__hf_assets_path=str(tokenizer_folder))
    assert build_data(config, dp_rank=0, dp_degree=1).tokenizer.vocab_size == 321


def test_file_tokenizer_fingerprint_follows_its_files(tokenizer_folder):
    before = load_file_tokenizer(str(tokenizer_folder)).fingerprint
    assert load_file_tokenizer(str(tokenizer_folder)).fingerprint == before
    (tokenizer_folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert load_file_tokenizer(str(tokenizer_folder)).fingerprint != before


def test_file_tokenizer_errors(tmp_path, tokenizer_folder):
    with pytest.raises(ConfigError, match="needs model.hf_assets_path"):
        load_file_tokenizer("")
    with pytest.raises(ConfigError, match="no such folder"):
        load_file_tokenizer(str(tmp_path / "nowhere"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="No supported tokenizer files"):
        load_file_tokenizer(str(empty))
    (tokenizer_folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="eos_token"):
        load_file_tokenizer(str(tokenizer_folder))
    (tokenizer_folder / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match="hf_assets_path"):
        load_file_tokenizer(str(tokenizer_folder))


def test_tokenizer_larger_than_the_model(make_config, tmp_path):
    check_vocabulary(300, 300, "")
    config = make_config(model__vocab_size=200)
    with pytest.raises(ConfigError, match="model.vocab_size = 200: smaller than the tokenizer's 257 .*at least 257"):
        build_data(config, dp_rank=0, dp_degree=1)
    config = make_config(data__tokenizer="bpe", data__tokenizer_vocab_size=5000)
    with pytest.raises(ConfigError, match="tokenizer_vocab_size to at most 4096"):
        build_data(config, dp_rank=0, dp_degree=1)
    assert not (tmp_path / "cache").exists()


def test_token_bytes_of_pieces_that_are_not_byte_level(tmp_path):
    vocabulary = {"<unk>": 0, "</s>": 1, "<0xC3>": 2, "\u2581the": 3, "é": 4}
    rust = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    rust.decoder = decoders.Metaspace()
    tokenizer = RustBackedTokenizer(rust, bos_id=1, eos_id=1, fingerprint="x")
    assert np.array_equal(tokenizer.token_bytes[1:], [0, 1, 4, 2])
