import errno

import pytest

from config.errors import ConfigError, places_are_the_users


def test_a_place_that_refuses_is_a_mistake_with_its_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/x: Not a directory. Choose another folder"), places_are_the_users():
        (tmp_path / "file" / "x").mkdir()
    with pytest.raises(ConfigError, match="^No space left on device. Choose"), places_are_the_users():
        raise OSError(errno.ENOSPC, "No space left on device")


def test_other_errors_of_the_system_keep_their_traceback(tmp_path):
    with pytest.raises(FileNotFoundError), places_are_the_users():
        (tmp_path / "nothing").read_text()
    with pytest.raises(BrokenPipeError), places_are_the_users():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
