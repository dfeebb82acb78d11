from pathlib import Path

import pytest

from config.errors import ConfigError
from data.build import build_data
from data.stream import Feed, StreamCorpus
from tests.data.generated import generated_texts, write_jsonl
from tests.data.test_loader import content, loader, steps


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three files of 150 rows."""
    texts = generated_texts(450)
    for i in range(3):
        write_jsonl(tmp_path / "rows" / f"{i}.jsonl", texts[150 * i : 150 * (i + 1)])
    return tmp_path / "rows"


@pytest.fixture
def stream(make_config, folder):
    return lambda **changes: make_config(data__corpus="hf", data__name=str(folder), **changes)


def test_documents_come_in_order_with_stable_names(folder):
    documents = list(StreamCorpus(str(folder)).documents())
    assert [d.text for d in documents] == generated_texts(450)
    assert documents[0].name == "rows/train:1" and documents[449].name == "rows/train:450"


def test_a_feed_continues_from_any_row_and_over_the_end(folder):
    corpus = StreamCorpus(str(folder))
    feed = Feed(corpus)
    states, documents = [], []
    for _ in range(460):
        states.append(feed.state())
        documents.append(feed.next_document())
    assert documents[450] is None and documents[451] == documents[0] and feed.epoch == 1
    for at in (0, 1, 149, 150, 151, 449, 450, 451, 455):
        resumed = Feed(corpus)
        resumed.restore(states[at])
        assert [resumed.next_document() for _ in range(3)] == documents[at : at + 3], at


def test_a_step_is_the_same_on_every_mesh(stream):
    config = stream(data__mask_boundary_labels=True)
    one = [loader(config).next_step()]
    expected = content(one[0])
    for degree in (2, 4):
        batches = [loader(config, rank, degree).next_step() for rank in range(degree)]
        assert [content(batches[g % degree])[g // degree] for g in range(4)] == expected
        assert {batch.global_valid_tokens for batch in batches} == {one[0].global_valid_tokens}
    assert one[0].global_valid_tokens < 8 * 64


def test_resume_continues_exactly_with_prefetch_and_over_epochs(stream):
    config = stream(data__prefetch_steps=2, training__seq_len=256)
    whole = steps(loader(config), 60)
    running = loader(config)
    for stop in range(60):
        if stop in (0, 1, 13, 24, 25, 59):
            resumed = loader(config)
            resumed.load_state_dict(running.state_dict())
            assert content(resumed.next_step()) == whole[stop], stop
            resumed.close()
        running.next_step()
    assert running.state_dict()["sources"][0]["epoch"] >= 1
    running.close()


def test_order_is_shuffled_by_the_seed_and_differs_between_epochs(stream):
    def names(seed: int, count: int) -> list[str]:
        source = loader(stream(debug__seed=seed, training__seq_len=1024))
        found: list[str] = []
        while len(found) < count:
            found += [n for m in source.next_step().micro_batches for n in m.document_names if n not in found[-50:]]
        return found

    first = names(0, 100)
    rows = [int(name.split(":")[1]) for name in first]
    assert rows != sorted(rows) and max(rows) <= 290
    assert names(0, 100) == first != names(1, 100)


def test_held_out_documents_are_never_trained_on(stream):
    pipeline = build_data(stream(data__holdout_percent=20.0, validation__steps=4), dp_rank=0, dp_degree=1)
    held_out = {document.name for document in pipeline.held_out_documents()}
    assert 50 < len(held_out) < 130
    trained = {n for _ in range(60) for m in pipeline.train.next_step().micro_batches for n in m.document_names}
    assert trained and not trained & held_out
    validated = {n for m in pipeline.validation() for n in m.document_names}
    assert validated and validated <= held_out
    assert pipeline.validation().windows == 4 * 2


def test_a_stream_in_a_mixture_resumes(stream, folder, make_config, tmp_path):
    config = make_config()
    sources = [
        {"corpus": "hf", "name": str(folder), "weight": 1},
        {"corpus": "text", "path": config.data.path, "weight": 2},
    ]
    config = make_config(data__corpus="mixture", data__sources=sources)
    whole = steps(loader(config), 12)
    running = loader(config)
    for _ in range(7):
        running.next_step()
    resumed = loader(config, 1, 2)
    resumed.load_state_dict(running.state_dict())
    assert content(resumed.next_step()) == whole[7][1::2]
    names = {name.split("/")[0].split(".")[0] for step in whole for m in step for name in m[5]}
    assert names == {"rows"} and any("train:" in name for step in whole for m in step for name in m[5])


def test_bpe_and_describe(stream):
    config = stream(data__tokenizer="bpe", data__tokenizer_vocab_size=300)
    pipeline = build_data(config, dp_rank=0, dp_degree=1)
    described = pipeline.describe()
    assert described["tokens"] is None and described["epochs"] is None and described["warnings"] == []
    assert pipeline.tokenizer.vocab_size == 300
    assert pipeline.train.next_step().micro_batches[0].text_bytes > 2 * 64


def test_the_hash_follows_the_files(stream, folder):
    def corpus_hash() -> str:
        return build_data(stream(), dp_rank=0, dp_degree=1).corpus_hash

    before = corpus_hash()
    assert corpus_hash() == before
    write_jsonl(folder / "2.jsonl", generated_texts(151, seed=9))
    assert corpus_hash() != before


def test_errors(make_config, stream, folder, tmp_path):
    with pytest.raises(ConfigError, match="data.name is empty"):
        StreamCorpus("")
    with pytest.raises(ConfigError, match="no such folder"):
        StreamCorpus(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="the folder is empty"):
        StreamCorpus(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="Check data.name, data.subset and data.split"):
        StreamCorpus(str(folder), split="test").fingerprint()
    with pytest.raises(ConfigError, match=r"row 1 of train: no field 'body' .*; the row has 'text', 'id'"):
        build_data(stream(data__text_field="body"), dp_rank=0, dp_degree=1)
    with pytest.raises(ConfigError, match="validation.steps = -1: a stream"):
        build_data(stream(validation__enable=True), dp_rank=0, dp_degree=1)


def test_a_hub_name_without_network_is_one_clear_error(monkeypatch, tmp_path):
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as raised:
        StreamCorpus("allenai/c4", "en").open()
    assert str(raised.value).startswith("data.name = 'allenai/c4': datasets cannot open allenai/c4, en, train:")
    assert "Without network use a local folder" in str(raised.value)
