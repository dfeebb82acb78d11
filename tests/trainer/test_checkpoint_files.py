import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from config.errors import ConfigError
from trainer.checkpoint_files import check_files, reading, writing


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step-4"
    with writing(path):
        dcp.save({"a": torch.arange(1000), "b": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    return path


def load(folder):
    state = {"a": torch.zeros(1000, dtype=torch.int64)}
    with reading(folder):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["a"]


def test_a_whole_checkpoint_is_read_without_a_word(folder):
    check_files(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(load(folder), torch.arange(1000))


def cut(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:500])


def lose(folder):
    (folder / "__0_0.distcp").unlink()


def spoil_the_index(folder):
    (folder / ".metadata").write_bytes(b"garbage\n")


def empty_the_index(folder):
    (folder / ".metadata").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "__0_0.distcp has 500 bytes of"),
        (lose, "__0_0.distcp is missing"),
        (spoil_the_index, ".metadata cannot be read (ValueError"),
        (empty_the_index, ".metadata cannot be read (EOFError"),
    ],
)
def test_damage_is_one_sentence_that_names_the_file(folder, damage, said):
    damage(folder)
    with pytest.raises(ConfigError) as refused:
        check_files(folder)
    assert said in str(refused.value) and str(folder) in str(refused.value) and "\n" not in str(refused.value)


def test_bytes_that_size_does_not_show_are_found_while_reading(folder):
    path = folder / "__0_0.distcp"
    path.write_bytes(b"\0" * path.stat().st_size)
    check_files(folder)
    with pytest.raises(ConfigError, match="step-4: rank 0: .*damaged.*move this folder away"):
        load(folder)


def test_a_place_that_cannot_be_written_keeps_its_cause(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"), writing(tmp_path / "file" / "x"):
        dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "file" / "x", no_dist=True)
