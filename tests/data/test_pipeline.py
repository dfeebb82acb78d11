import json

import pytest
import torch

from config.errors import ConfigError
from data.batch import MicroBatch
from data.build import build_data
from data.documents import Document, is_held_out, text_hash
from tests.data.generated import generated_texts, write_jsonl


def rows_of(batches: list[MicroBatch]) -> list[tuple[int, list[int], list[int]]]:
    """(window, tokens, labels) of every row that is not padding."""
    return [
        (index, tokens, labels)
        for batch in batches
        for index, tokens, labels in zip(batch.sample_ids, batch.tokens.tolist(), batch.labels.tolist(), strict=True)
        if index >= 0
    ]


def test_held_out_documents_are_disjoint_from_training(make_config):
    pipeline = build_data(make_config(data__holdout_percent=20.0), dp_rank=0, dp_degree=1)
    held_out = list(pipeline.held_out_documents())
    described = pipeline.describe()
    assert len(held_out) == described["held_out_documents"] and len(held_out) + described["documents"] == 120
    names = {document.name for document in held_out}
    trained = {n for _ in range(60) for m in pipeline.train.next_step().micro_batches for n in m.document_names}
    validated = {n for m in pipeline.validation() for n in m.document_names}
    assert validated == names and len(trained) == described["documents"] and not trained & names


def test_all_held_out_text_is_evaluated_once(make_config):
    config = make_config(data__holdout_percent=20.0)
    pipeline = build_data(config, dp_rank=0, dp_degree=1)
    batches = list(pipeline.validation())
    labels = torch.cat([m.labels.flatten() for m in batches])
    by_text = sorted(d.text.encode() for d in pipeline.held_out_documents())
    first_token = int(batches[0].tokens[0, 0])
    text = bytes([first_token, *(i for i in labels.tolist() if 0 <= i < 256)])
    assert len(text) == sum(map(len, by_text)) and all(document in text for document in by_text)
    assert sum(m.text_bytes for m in batches) == len(text) - 1  # all but the first byte are targets


@pytest.mark.parametrize("limit", [-1, 3])
def test_the_same_windows_each_time_on_every_mesh(make_config, limit):
    config = make_config(data__holdout_percent=20.0, validation__steps=limit, data__document_mask=True)
    expected = None
    for degree in (1, 2, 4):
        found = []
        lengths = set()
        for rank in range(degree):
            validation = build_data(config, dp_rank=rank, dp_degree=degree).validation()
            batches = list(validation)
            assert len(batches) == len(validation)
            assert rows_of(list(validation)) == rows_of(batches)
            assert all(batch.tokens.shape == (2, 64) for batch in batches)
            for batch in batches:
                padded = [i for i, index in enumerate(batch.sample_ids) if index < 0]
                assert (batch.labels[padded] == -100).all()
            lengths.add(len(batches))
            found += [(row, batch) for batch in batches for row in rows_of([batch])]
        assert len(lengths) == 1
        rows = sorted(row for row, _ in found)
        assert [index for index, _, _ in rows] == list(range(len(rows)))
        expected = expected or rows
        assert rows == expected
    if limit > 0:
        assert len(expected) == limit * 2


def test_validation_text_bytes_do_not_depend_on_the_tokenizer(make_config):
    held = dict(data__holdout_percent=20.0)
    by_bytes = build_data(make_config(**held), dp_rank=0, dp_degree=1)
    by_bpe = build_data(
        make_config(**held, data__tokenizer="bpe", data__tokenizer_vocab_size=300), dp_rank=0, dp_degree=1
    )
    sizes = [sum(m.text_bytes for m in pipeline.validation()) for pipeline in (by_bytes, by_bpe)]
    first_token = by_bpe.tokenizer.token_bytes[int(next(iter(by_bpe.validation())).tokens[0, 0])]
    assert sizes[0] + 1 == sizes[1] + first_token


def test_nothing_held_out(make_config, tmp_path):
    write_jsonl(tmp_path / "corpus" / "rows.jsonl", ["only one document"])
    with pytest.raises(ConfigError, match="holdout_percent = 5.0: no document is held out"):
        build_data(make_config(validation__enable=True), dp_rank=0, dp_degree=1)
    with pytest.raises(ConfigError, match="no document is held out"):
        build_data(make_config(), dp_rank=0, dp_degree=1).validation()


def test_everything_held_out(make_config, tmp_path):
    unlucky = next(t for t in generated_texts(50) if is_held_out(text_hash(Document("", t)), 50.0))
    write_jsonl(tmp_path / "corpus" / "rows.jsonl", [unlucky])
    with pytest.raises(ConfigError, match=r"every document of data.path \(1\) is held out"):
        build_data(make_config(data__holdout_percent=50.0), dp_rank=0, dp_degree=1)


def test_describe(make_config):
    pipeline = build_data(make_config(training__steps=1000), dp_rank=0, dp_degree=1)
    described = pipeline.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["corpus_hash"] == pipeline.corpus_hash
    assert described["tokens_per_step"] == 8 * 64
    assert described["epochs"] == 1000 * 8 * 64 / described["tokens"]
    [warning] = described["warnings"]
    assert f"{described['epochs']:.1f} times" in warning and f"{described['tokens']:,} tokens" in warning
    short = build_data(make_config(training__steps=1), dp_rank=0, dp_degree=1).describe()
    assert short["warnings"] == [] and short["epochs"] < 1


def test_mixture_proportions_and_description(make_config, tmp_path):
    for name in ("a", "b"):
        write_jsonl(tmp_path / name / f"{name}.jsonl", [f"{name} {text}" for text in generated_texts(60)])
    sources = [
        {"corpus": "text", "path": str(tmp_path / "a"), "weight": 3},
        {"corpus": "text", "path": str(tmp_path / "b"), "weight": 1},
    ]
    config = make_config(
        data__corpus="mixture",
        data__sources=sources,
        data__holdout_percent=20.0,
        training__global_batch_size=64,
        training__local_batch_size=1,
        validation__steps=4,
        validation__local_batch_size=1,
    )
    pipeline = build_data(config, dp_rank=0, dp_degree=1)
    seen = [m.document_names for _ in range(4) for m in pipeline.train.next_step().micro_batches]
    origins = [{name[0] for name in names} for names in seen]
    assert all(len(origin) == 1 for origin in origins)  # a sequence comes from one source
    assert origins.count({"a"}) == 192 and origins.count({"b"}) == 64
    described = pipeline.describe()
    assert [s["weight"] for s in described["sources"]] == [3.0, 1.0] and described["epochs"] is None
    assert described["documents"] == sum(s["documents"] for s in described["sources"])
    assert described["sources"][0]["epochs"] == pytest.approx(10 * 64 * 64 * 0.75 / described["sources"][0]["tokens"])
    validated = [m.document_names[0][0] for m in pipeline.validation()]
    assert sorted(validated) == ["a", "a", "a", "b"]


def test_errors_of_a_mixture_name_its_table(make_config, tmp_path):
    sources = [{"corpus": "python", "weight": 1}, {"corpus": "text", "path": str(tmp_path / "no"), "weight": 1}]
    with pytest.raises(ConfigError, match="data.sources, table 2: data.path = .*no such file"):
        build_data(make_config(data__corpus="mixture", data__sources=sources), dp_rank=0, dp_degree=1)
