"""Tests that need GPUs skip where there are too few; one short run is trained for all that read one."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")]
    if not needing:
        return  # and torch need not be imported
    import torch

    there = torch.cuda.device_count()
    for item in needing:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1
        if there < needed:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {needed} GPU{'s' * (needed > 1)}, this machine has {there}")
            )


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense run with checkpoints at steps 20 and 40. Copy it before anything is written into it."""
    from tests.trained_run import train_run

    return train_run(tmp_path_factory.mktemp("trained"), "debug_cpu.toml")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PARITY_TABLE" in os.environ:
        from tests import parity_table

        parity_table.write(session.testsfailed)
