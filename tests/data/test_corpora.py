import gzip
import lzma
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from config.errors import ConfigError
from data.corpora import PythonCorpus, TextCorpus
from data.documents import Document, is_held_out, text_hash

ASSETS = Path(__file__).parent / "assets"


def test_python_corpus_is_the_library_without_its_tests():
    documents = list(PythonCorpus().documents())
    names = [document.name for document in documents]
    assert len(set(names)) == len(names) > 300
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not [n for n in names if {"test", "tests", "idle_test", "site-packages"} & set(n.split("/"))]
    assert not [n for n in names if "_sysconfigdata" in n]
    prose = {document.name: document.text for document in documents if document.name.startswith("pydoc_data.topics/")}
    assert "truth value" in prose["pydoc_data.topics/truth"].lower()
    assert "pydoc_data/topics.py" not in names  # its text is there as prose, and not a second time as source


def test_python_corpus_roots(tmp_path):
    (tmp_path / "lib" / "__pycache__").mkdir(parents=True)
    (tmp_path / "lib" / "a.py").write_text("x = 1\n")
    (tmp_path / "lib" / "notes.md").write_text("# notes\n")
    (tmp_path / "lib" / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "lib" / "data.bin").write_bytes(b"x")
    (tmp_path / "lib" / "__pycache__" / "a.txt").write_text("x")
    without, with_root = PythonCorpus(), PythonCorpus([str(tmp_path / "lib")])
    added = {d.name for d in with_root.documents()} - {d.name for d in without.documents()}
    assert added == {"lib/a.py", "lib/notes.md"}  # a file that is not UTF-8 is left out
    assert with_root.fingerprint() != without.fingerprint()
    with pytest.raises(ConfigError, match="data.roots.*nowhere.*not a folder"):
        PythonCorpus([str(tmp_path / "nowhere")])
    folders = PythonCorpus(["site-packages"]).folders
    assert folders == [("site-packages", Path(sysconfig.get_path("purelib")))]


def test_all_text_formats_give_their_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("plain\ntext é\n")
    gzip.open(tmp_path / "b.txt.gz", "wb").write(b"zipped\n")
    lzma.open(tmp_path / "c.txt.xz", "wb").write(b"packed\n")
    rows = b'{"text": "one"}\n\n{"text": " "}\n{"text": "two\\n\\u00e9"}\n'
    (tmp_path / "d.jsonl").write_bytes(rows)
    gzip.open(tmp_path / "sub" / "e.jsonl.gz", "wb").write(rows)
    lzma.open(tmp_path / "sub" / "f.jsonl.xz", "wb").write(rows)
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["first", "second"]}), tmp_path / "g.parquet")
    (tmp_path / "ignored.csv").write_text("x")
    assert list(TextCorpus(str(tmp_path)).documents()) == [
        Document("a.txt", "plain\ntext é\n"),
        Document("b.txt.gz", "zipped\n"),
        Document("c.txt.xz", "packed\n"),
        Document("d.jsonl:1", "one"),
        Document("d.jsonl:4", "two\né"),
        Document("g.parquet:1", "first"),
        Document("g.parquet:2", "second"),
        Document("sub/e.jsonl.gz:1", "one"),
        Document("sub/e.jsonl.gz:4", "two\né"),
        Document("sub/f.jsonl.xz:1", "one"),
        Document("sub/f.jsonl.xz:4", "two\né"),
    ]
    assert list(TextCorpus(str(tmp_path / "a.txt")).documents()) == [Document("a.txt", "plain\ntext é\n")]


def test_a_long_text_file_is_cut_at_line_ends(tmp_path):
    text = "".join(f"line {i} of a long file\n" for i in range(5000))
    (tmp_path / "long.txt").write_text(text)
    documents = list(TextCorpus(str(tmp_path)).documents())
    assert [d.name for d in documents[:2]] == ["long.txt#1", "long.txt#2"] and len(documents) == 4
    assert "".join(d.text for d in documents) == text
    assert all(d.text.endswith("\n") for d in documents)


def test_another_text_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "content": "yes"}\n')
    assert [d.text for d in TextCorpus(str(tmp_path), "content").documents()] == ["yes"]
    assert TextCorpus(str(tmp_path), "content").fingerprint() != TextCorpus(str(tmp_path)).fingerprint()


def test_fingerprint_follows_names_and_contents_and_nothing_else(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder in ("a", "b"):
        (tmp_path / folder / "x.txt").write_text("same")
    corpora = [TextCorpus(str(tmp_path / folder)) for folder in "ab"]
    assert corpora[0].fingerprint() == corpora[1].fingerprint()
    stat = (tmp_path / "b" / "x.txt").stat()
    (tmp_path / "b" / "x.txt").write_text("sane")
    os.utime(tmp_path / "b" / "x.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same date
    assert corpora[0].fingerprint() != corpora[1].fingerprint()
    (tmp_path / "b" / "x.txt").write_text("same")
    (tmp_path / "b" / "x.txt").rename(tmp_path / "b" / "y.txt")
    assert TextCorpus(str(tmp_path / "b")).fingerprint() != corpora[0].fingerprint()


def read(path: Path, field: str = "text") -> list[Document]:
    return list(TextCorpus(str(path), field).documents())


def test_missing_and_unsupported_paths(tmp_path):
    with pytest.raises(ConfigError, match="data.path is empty"):
        TextCorpus("")
    with pytest.raises(ConfigError, match="nowhere.*no such file or folder"):
        TextCorpus(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"holds none of the formats \.txt"):
        TextCorpus(str(tmp_path))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match="holds none of the formats"):
        TextCorpus(str(tmp_path / "a.csv"))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "there.txt").write_text("words")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(ConfigError, match="gone.txt: cannot be read: No such file or directory; repair or remove it"):
        TextCorpus(str(tmp_path)).fingerprint()


@pytest.mark.parametrize("name", ["bad.txt", "bad.jsonl"])
def test_not_utf8_names_file_and_line(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(ConfigError, match=rf"{name}:2: not UTF-8 \(byte 0xe9 at column 14\)"):
        read(tmp_path)


def test_rows_without_the_field(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n{"body": "x", "id": 3}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: no field 'text' .*; the row has 'body', 'id'"):
        read(path)
    path.write_text('{"text": 7}\n')
    with pytest.raises(ConfigError, match="rows.jsonl:1: field 'text' .* holds int, not text"):
        read(path)
    path.write_text("[1, 2]\n")
    with pytest.raises(ConfigError, match="rows.jsonl:1: the row is list"):
        read(path)
    path.write_text('{"text": "fine"}\n\n{"text" 7}\n')
    with pytest.raises(ConfigError, match="rows.jsonl:3: not JSON: Expecting ':' delimiter at column 9$"):
        read(path)


def test_parquet_errors(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "body": ["x"]}), path)
    with pytest.raises(ConfigError, match="rows.parquet: no field 'text' .*the file has 'id', 'body'"):
        read(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None]}), path)
    with pytest.raises(ConfigError, match="rows.parquet: row 2: field 'text' .* holds NoneType"):
        read(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match="rows.parquet: not a readable parquet file"):
        read(path)


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_damaged_archives(tmp_path, suffix):
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(b"not an archive at all")
    with pytest.raises(ConfigError, match=rf"a.txt.{suffix}: damaged archive after line 0"):
        read(path)
    whole = {"gz": gzip.compress, "xz": lzma.compress}[suffix](os.urandom(5000).hex().encode())
    path.write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match="damaged archive"):
        read(path)


def test_a_lone_surrogate_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "half \\ud800"}\n')
    with pytest.raises(ConfigError, match="rows.jsonl:1: character 5 is a lone surrogate"):
        text_hash(read(path)[0])


def test_hold_out_depends_on_the_text_alone_in_every_process():
    documents = list(TextCorpus(str(ASSETS)).documents())
    held_out = [d.name for d in documents if is_held_out(text_hash(d), 50.0)]
    assert held_out == ["harbour.txt"]
    renamed = Document("elsewhere", documents[0].text)
    assert text_hash(renamed) == text_hash(documents[0])
    program = (
        "from data.documents import Document, text_hash; from pathlib import Path; "
        f"print(text_hash(Document('x', Path({str(ASSETS / 'bread.txt')!r}).read_text())))"
    )
    seen = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        cwd=ASSETS.parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(seen.stdout) == text_hash(documents[0])


def test_hold_out_share():
    hashes = [text_hash(Document("", str(i))) for i in range(4000)]
    for percent in (0.0, 5.0, 50.0):
        share = sum(is_held_out(h, percent) for h in hashes) / len(hashes) * 100
        assert abs(share - percent) < 2.5
