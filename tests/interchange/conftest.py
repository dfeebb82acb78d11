"""Folders that transformers wrote, and checkpoints made of them, once a session."""

from pathlib import Path

import pytest
import torch

from interchange import to_checkpoint
from tests.interchange.peers import saved_peer


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Name -> (folder of transformers, our checkpoint of it), made once."""
    made: dict[tuple, tuple[Path, Path]] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
        if (name, dtype) not in made:
            root = tmp_path_factory.mktemp("folders")
            saved_peer(name, root / "hf", dtype)
            made[name, dtype] = root / "hf", to_checkpoint.import_hf(root / "hf", root / "imported")
        return made[name, dtype]

    return get
