import errno
import hashlib
import json
import os
import threading
import time
from pathlib import Path

import pytest

from config.errors import ConfigError
from data import file_hashes
from data.corpora import TextCorpus
from data.file_hashes import content_hashes

OLD = 1_700_000_000_123_456_789


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Paths that were read, in order."""
    seen: list[str] = []
    read = file_hashes._read
    monkeypatch.setattr(file_hashes, "_read", lambda path: (seen.append(path), read(path))[1])
    return seen


@pytest.fixture
def settled(monkeypatch) -> None:
    """Files count as settled at once: what a test writes is fresh."""
    monkeypatch.setattr(file_hashes, "SETTLED_NS", -1_000_000_000)


def files(folder: Path, **texts: str) -> list[str]:
    for name, text in texts.items():
        (folder / name).write_text(text)
    return [str(folder / name) for name in texts]


def test_only_what_changed_is_read_again(tmp_path, reads, settled):
    paths, index = files(tmp_path, a="one", b="two", c="three"), tmp_path / "cache" / "index.json"
    assert content_hashes(paths, index) == [sha("one"), sha("two"), sha("three")]
    assert sorted(reads) == paths
    reads.clear()
    assert content_hashes(paths, index) == [sha("one"), sha("two"), sha("three")] and reads == []

    status = os.stat(paths[1])
    (tmp_path / "b").write_text("TWO")
    os.utime(paths[1], ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same date; ctime tells
    assert content_hashes(paths, index)[1] == sha("TWO") and reads == [paths[1]]

    reads.clear()
    (tmp_path / "new").write_text("one")
    os.replace(tmp_path / "new", paths[0])  # another inode
    paths += files(tmp_path, d="four")
    assert content_hashes(paths, index) == [sha("one"), sha("TWO"), sha("three"), sha("four")]
    assert sorted(reads) == [paths[0], paths[3]]
    reads.clear()
    assert content_hashes(paths[::-1], index)[0] == sha("four") and reads == []
    assert content_hashes(paths) == [sha("one"), sha("TWO"), sha("three"), sha("four")]
    assert sorted(reads) == paths  # without an index every file is read


@pytest.mark.parametrize(
    ("changed", "remembered"),
    [(OLD, True), (OLD // 1_000_000_000 * 1_000_000_000, False), (None, False)],
    ids=["settled", "whole second", "just now"],
)
def test_what_times_cannot_show_is_read_at_every_start(tmp_path, monkeypatch, changed, remembered):
    """A file changes and its times do not: the clock is too coarse to tell the two contents apart."""
    paths, index = files(tmp_path, a="old"), tmp_path / "index.json"
    stamp = changed or time.time_ns()
    monkeypatch.setattr(file_hashes, "_of", lambda status: (status.st_size, stamp, stamp, 1))
    assert content_hashes(paths, index) == [sha("old")]
    (tmp_path / "a").write_text("new")
    assert content_hashes(paths, index) == [sha("old" if remembered else "new")]


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch, reads, settled):
    paths, index = files(tmp_path, a="first"), tmp_path / "index.json"
    digest = hashlib.file_digest

    def slow(stream, name):
        found = digest(stream, name)
        Path(paths[0]).write_text("later")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", slow)
        assert content_hashes(paths, index) == [sha("first")]
    assert content_hashes(paths, index) == [sha("later")] and len(reads) == 2


@pytest.mark.parametrize("rememberable", [True, False])
def test_processes_that_start_together(tmp_path, monkeypatch, settled, rememberable):
    """One reads and the others take its answers; where nothing can be remembered, they read side by side."""
    paths, index = files(tmp_path, **{f"f{i}": str(i) for i in range(100)}), tmp_path / "cache" / "index.json"
    if not rememberable:
        monkeypatch.setattr(file_hashes, "SETTLED_NS", 10**18)
    read_all, batches, inside, together = file_hashes._read_all, [], [], []

    def counting(chosen):
        batches.append(len(chosen))
        inside.append(None)
        time.sleep(0.2)
        together.append(len(inside))
        inside.pop()
        return read_all(chosen)

    monkeypatch.setattr(file_hashes, "_read_all", counting)
    results: list[list[str]] = []
    ranks = [threading.Thread(target=lambda: results.append(content_hashes(paths, index))) for _ in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert results == [[sha(str(i)) for i in range(100)]] * 4
    assert sorted(batches) == ([0, 0, 0, 100] if rememberable else [100] * 4)
    assert rememberable or max(together) > 1


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 1}', '[["x", 1]]'])
def test_a_damaged_index_is_replaced(tmp_path, reads, settled, content):
    paths, index = files(tmp_path, a="one"), tmp_path / "index.json"
    index.write_text(content)
    assert content_hashes(paths, index) == content_hashes(paths, index) == [sha("one")]
    assert reads == paths


def test_an_index_that_cannot_be_written_is_done_without(tmp_path, reads, settled):
    paths = files(tmp_path, a="one")
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert content_hashes(paths, tmp_path / "file" / "index.json") == [sha("one")]
    assert reads == paths * 2


def test_a_full_disk_is_not_filled_further(tmp_path, monkeypatch, reads, settled):
    """The old index stays, and no part of a new one beside it."""
    paths, cache = files(tmp_path, a="one"), tmp_path / "cache"
    content_hashes(paths, cache / "index.json")
    there = sorted(cache.iterdir())
    (cache / ".index.json.killed").write_text("half")

    def full(value, stream):
        stream.write("[")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    paths += files(tmp_path, b="two")
    for _ in range(2):
        assert content_hashes(paths, cache / "index.json") == [sha("one"), sha("two")]
    assert sorted(cache.iterdir()) == there and reads == [paths[0], paths[1], paths[1]]


def test_unreadable_files_are_named_with_an_index_too(tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    for index in (None, tmp_path / "index.json"):
        with pytest.raises(ConfigError, match="gone.txt: cannot be read: No such file or directory; repair or remove"):
            content_hashes([str(tmp_path / "gone.txt")], index)


def test_a_corpus_remembers_and_notices(tmp_path, monkeypatch, reads, settled):
    monkeypatch.chdir(tmp_path)
    for folder in ("text", "there/text"):
        Path(folder).mkdir(parents=True)
        Path(folder, "a.txt").write_text("words")
    cache = tmp_path / "cache"
    first = TextCorpus("text").fingerprint(cache)
    assert first == TextCorpus("text").fingerprint() == TextCorpus(str(tmp_path / "text")).fingerprint(cache)
    reads.clear()
    assert TextCorpus("text").fingerprint(cache) == first and reads == []
    monkeypatch.chdir(tmp_path / "there")  # the same relative path, another folder
    Path("text/a.txt").write_text("other")
    assert TextCorpus("text").fingerprint(cache) != first and reads == [str(tmp_path / "there/text/a.txt")]
    assert len(list(cache.glob("*.json"))) == 2
    monkeypatch.chdir(tmp_path)
    Path("text/b.txt").write_text("more")
    assert TextCorpus("text").fingerprint(cache) == TextCorpus("text").fingerprint() != first
