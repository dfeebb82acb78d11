"""Two ranks read and write what one process does, to the byte."""

import pytest
import torch

from interchange import export
from interchange.weights import HuggingFaceWeights
from tests import ranks
from tests.interchange.saved_runs import begin_from, configuration, export_at_the_end, save_run, whole_parameters

FSDP: dict = {}
TP = {"parallelism__tensor_parallel_degree": 2}
EP = {"parallelism__expert_parallel_degree": 2}
PP = {
    "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_first_stage_less_layers": 0,
    "parallelism__pipeline_parallel_last_stage_less_layers": 0,
}


DENSE, EXPERTS = "llama, scaled rope, tied", "qwen3_moe"


@pytest.mark.parametrize(
    ("name", "mesh"),
    [(DENSE, FSDP), (DENSE, TP), (DENSE, PP), (EXPERTS, FSDP), (EXPERTS, TP), (EXPERTS, PP), (EXPERTS, EP)],
    ids=[
        f"{kind}-{mesh}" for kind, more in (("dense", []), ("experts", ["ep"])) for mesh in ("fsdp", "tp", "pp", *more)
    ],
)
def test_two_ranks_read_and_write_what_one_does(name, mesh, folders, tmp_path, monkeypatch):
    folder, imported = folders(name)
    config = configuration(imported / "model.toml", **begin_from(folder))
    alone = save_run(config, tmp_path / "one")
    monkeypatch.setattr(export, "FILE_BYTES", 10_000)
    expected = export.export_run(alone, tmp_path / "expected")

    config = configuration(imported / "model.toml", **begin_from(folder), **mesh)
    weights = HuggingFaceWeights(folder)
    if mesh is not PP:  # there a rank has its stages alone
        for found in ranks.run(2, whole_parameters, config):
            assert found.keys() == set(weights)
            for parameter_name, parameter in found.items():
                stored = weights.read(parameter_name, parameter.shape, torch.device("cpu"))
                assert torch.equal(parameter, stored), parameter_name
    ranks.run(2, export_at_the_end, config, tmp_path / "two")
    out = tmp_path / "two" / "checkpoint" / "step-1-hf"
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in expected.iterdir())
    assert len(list(out.glob("*.safetensors"))) > 5
    for path in expected.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
