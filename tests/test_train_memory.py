"""A run that is out of memory says what would help."""

import json

import torch

import train
from benchmarks.side import reason_of
from tests.data.generated import generated_texts, write_jsonl


def test_the_reason_names_three_switches(tmp_path, monkeypatch, capsys):
    corpus = write_jsonl(tmp_path / "corpus" / "rows.jsonl", generated_texts(50)).parent
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

    monkeypatch.setattr(train, "train", full)
    words = [
        "--data.corpus",
        "text",
        "--data.path",
        str(corpus),
        "--data.tokenizer",
        "bytes",
        "--training.seq_len",
        "64",
    ]
    code = train.main([*words, "--job.run_dir", str(tmp_path / "run"), "--training.steps", "2"])
    reason = json.loads((tmp_path / "run" / "FAILED").read_text())["reason"]
    assert code == 1 and "2.50 GiB more were asked for; by the estimate (" in reason
    assert reason.count(" GiB)") == 3 and "training.local_batch_size = 4" in reason
    said = capsys.readouterr().err
    assert reason in said and reason_of(1, said) == "out of memory"
