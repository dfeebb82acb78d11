import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from config.errors import ConfigError
from data.build import build_data
from data.cache import build_once, cache_root
from data.corpora import TextCorpus
from data.documents import Document
from data.token_store import stored, tokenize
from data.tokenizers import ByteTokenizer
from tests.data.generated import generated_texts, write_jsonl


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_documents_come_back_from_the_store(tmp_path):
    texts = generated_texts(30)
    corpus = TextCorpus(str(write_jsonl(tmp_path / "rows.jsonl", texts)))
    tokenizer = ByteTokenizer()
    for _ in range(2):  # built, then read back
        store = stored(corpus, corpus.fingerprint(), tokenizer, tmp_path / "cache")
        assert isinstance(store.tokens, np.memmap) and store.tokens.dtype == np.uint16
        for d, text in enumerate(texts):
            ids = store.tokens[store.offsets[d] : store.offsets[d + 1]].tolist()
            assert ids == [*text.encode(), tokenizer.eos_id]
            assert store.names[d] == f"rows.jsonl:{d + 1}"
    assert len(store.names) == len(store.hashes) == 30


@pytest.mark.parametrize("characters", [1, 300, 10**9])
def test_batches_are_encoded_ahead_and_come_in_order(monkeypatch, characters):
    """Later batches may be ready first, and few are held at a time."""
    documents = [Document(str(i), "x" * (i % 7 + 1) * 10 + str(i)) for i in range(40)]
    running, most, taken = 0, 0, 0

    class Slow(ByteTokenizer):
        def encode_batch(self, texts):
            time.sleep(0.01 if texts and texts[0].endswith(("0", "5")) else 0)
            return super().encode_batch(texts)

    def counted():
        nonlocal running, most
        for document in documents:
            running += 1
            most = max(most, running - taken)
            yield document

    monkeypatch.setattr("data.token_store.BATCH_CHARACTERS", characters)
    found = []
    for document, ids in tokenize(counted(), Slow()):
        taken += 1
        found.append((document, bytes(ids[:-1].tolist()).decode(), int(ids[-1])))
    assert found == [(document, document.text, 256) for document in documents]
    assert most == {1: 3, 300: most, 10**9: 40}[characters]


def test_what_goes_wrong_while_encoding_ahead_is_raised(monkeypatch):
    monkeypatch.setattr("data.token_store.BATCH_CHARACTERS", 1)

    def failing():
        yield from [Document("a", "a"), Document("b", "b"), Document("c", "c")]
        raise ConfigError("row 4")

    with pytest.raises(ConfigError, match="row 4"):
        list(tokenize(failing(), ByteTokenizer()))
    with pytest.raises(UnicodeEncodeError):
        list(tokenize([Document("a", "\ud800")] * 5, ByteTokenizer()))


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path):
    class Large(ByteTokenizer):
        vocab_size = 70_000
        eos_id = 69_999
        fingerprint = "large"

    corpus = TextCorpus(str(write_jsonl(tmp_path / "rows.jsonl", ["ab"])))
    store = stored(corpus, corpus.fingerprint(), Large(), tmp_path / "cache")
    assert store.tokens.dtype == np.uint32 and store.tokens.tolist() == [97, 98, 69_999]


def test_the_cache_is_reused_and_follows_corpus_and_tokenizer(make_config, tmp_path, monkeypatch):
    first = build_data(make_config(), dp_rank=0, dp_degree=1)
    tokens = tmp_path / "cache" / "tokens"
    assert len(folders(tokens)) == 1

    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "encode_batch", None)  # encoding again would fail
        again = build_data(make_config(), dp_rank=0, dp_degree=1)
        seed = build_data(make_config(debug__seed=7), dp_rank=0, dp_degree=1)
    assert again.corpus_hash == first.corpus_hash == seed.corpus_hash
    assert len(folders(tokens)) == 1

    bpe = build_data(make_config(data__tokenizer="bpe", data__tokenizer_vocab_size=300), dp_rank=0, dp_degree=1)
    assert bpe.corpus_hash != first.corpus_hash and len(folders(tokens)) == 2

    write_jsonl(tmp_path / "corpus" / "rows.jsonl", [*generated_texts(120)[:-1], "another last document"])
    changed = build_data(make_config(), dp_rank=0, dp_degree=1)
    assert changed.corpus_hash != first.corpus_hash and len(folders(tokens)) == 3


def test_the_corpus_hash_covers_what_changes_the_data(make_config):
    def corpus_hash(**changes):
        return build_data(make_config(**changes), dp_rank=0, dp_degree=1).corpus_hash

    base = corpus_hash()
    assert corpus_hash(data__holdout_percent=20.0) != base
    assert corpus_hash(data__mask_boundary_labels=True) != base
    parts = [{"corpus": "text", "path": make_config().data.path, "weight": weight} for weight in (1.0, 3.0)]
    mixed = [corpus_hash(data__corpus="mixture", data__sources=each) for each in (parts, parts[::-1])]
    assert mixed[0] != mixed[1]
    assert corpus_hash(data__prefetch_steps=3, training__seq_len=32, data__document_mask=True) == base


BUILD = """
import sys, time
from pathlib import Path
from data.cache import build_once

def build(folder):
    open(sys.argv[2], "a").write("built\\n")
    time.sleep(0.5)
    (folder / "result").write_text("complete")

assert (build_once(Path(sys.argv[1]), build) / "result").read_text() == "complete"
"""


def test_processes_that_start_together_build_once(tmp_path):
    command = [sys.executable, "-c", BUILD, str(tmp_path / "cache" / "key"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[2]) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_failed_build_leaves_nothing_and_is_tried_again(tmp_path):
    target = tmp_path / "cache" / "key"

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        build_once(target, fail)
    assert folders(target.parent) == []
    (target.parent / ".key.killed").mkdir()  # what a killed process leaves
    build_once(target, lambda folder: (folder / "whole").write_text("x") and None)
    assert folders(target.parent) == [target] and (target / "whole").exists()


def test_a_cut_off_store_is_refused(make_config, tmp_path):
    build_data(make_config(), dp_rank=0, dp_degree=1)
    [folder] = folders(tmp_path / "cache" / "tokens")
    (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes()[:-10])
    with pytest.raises(ConfigError, match="is damaged; delete that folder"):
        build_data(make_config(), dp_rank=0, dp_degree=1)


def test_a_cache_that_cannot_be_written(make_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data.cache_dir: cannot write.*Not a directory"):
        build_data(make_config(data__cache_dir=str(tmp_path / "file" / "cache")), dp_rank=0, dp_degree=1)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root("") == tmp_path / "ablation-trainer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root("") == Path.home() / ".cache" / "ablation-trainer"
    assert cache_root("~/x") == Path.home() / "x"


def test_an_empty_corpus(make_config, tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "rows.jsonl").write_text('{"text": "  "}\n')
    for tokenizer in ("bytes", "bpe"):
        with pytest.raises(ConfigError, match="data.path: the corpus is empty"):
            build_data(make_config(data__tokenizer=tokenizer), dp_rank=0, dp_degree=1)
