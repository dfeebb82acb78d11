"""Folders in and out: what transformers writes we read, what we write it reads, and nothing changes a bit."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

import train
from config.errors import ConfigError
from config.world import mesh_degrees
from data.tokenizers import load_file_tokenizer
from interchange import export, to_checkpoint
from interchange.load import load_hf_model, load_run_model
from interchange.weights import HuggingFaceWeights
from parallelisms.mesh import Mesh
from parallelisms.names import plain_name
from tests.interchange.peers import PEERS, saved_peer
from tests.interchange.saved_runs import begin_from, configuration, save_run
from trainer.checkpoint import Checkpointer

TOKENS = torch.randint(0, 288, (2, 24), generator=torch.Generator().manual_seed(3))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", PEERS)
def test_a_round_trip_is_bit_exact_and_transformers_reads_it(name, folders, tmp_path):
    """transformers -> run that begins from it -> checkpoint -> export -> transformers."""
    folder, imported = folders(name)
    run_dir = save_run(configuration(imported / "model.toml", **begin_from(folder)), tmp_path / "run")
    out = export.export_run(run_dir, tmp_path / "out")
    same(tensors(out), tensors(folder))
    assert torch.equal(load_run_model(run_dir)(TOKENS), load_hf_model(folder)(TOKENS))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(theirs(TOKENS).logits, again(TOKENS).logits)
    a, b = (json.loads((path / "config.json").read_text()) for path in (folder, out))
    assert transformers.AutoConfig.from_pretrained(folder).rope_parameters == again.config.rope_parameters
    assert a["architectures"] == b["architectures"]


@pytest.mark.parametrize("name", ["qwen3, tied", "mixtral"])
def test_bfloat16_comes_back_as_it_was(name, folders, tmp_path):
    folder, imported = folders(name, torch.bfloat16)
    config = configuration(imported / "model.toml", **begin_from(folder))
    out = export.export_run(save_run(config, tmp_path / "run"), tmp_path / "out", dtype="bfloat16")
    same(tensors(out), tensors(folder))
    assert transformers.AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "balance"),
    [("llama, scaled rope, tied", "none"), ("qwen3_moe", "aux_loss"), ("qwen3_moe", "bias_sign")],
)
def test_an_imported_checkpoint_starts_a_run(name, balance, folders, tmp_path):
    """What `python -m interchange import` writes is a checkpoint like a run's own, without balancing state."""
    folder, imported = folders(name)
    stored = FileSystemReader(imported).read_metadata().state_dict_metadata
    config = configuration(imported / "model.toml", checkpoint__initial_load_path=str(imported), moe__balance=balance)
    mesh = Mesh(rank=0, **mesh_degrees(config, 1))
    model = train.build_model(config, mesh, torch.device("cpu"))
    assert stored.keys() == {f"model.{n}" for n in model.state_dict() if not n.endswith(".bias")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(
        tmp_path / "none", config.checkpoint, model=model, optimizer=optimizer, plain_name=plain_name, parts={}, steps=1
    )
    assert checkpointer.restore() == 0
    weights = HuggingFaceWeights(folder)
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights.read(parameter_name, parameter.shape, torch.device("cpu")))


def test_many_files(folders, tmp_path, monkeypatch):
    """Folders of several files, ours and transformers', hold the same tensors, and each reads the other's."""
    folder, imported = folders("olmoe")
    config = configuration(imported / "model.toml", **begin_from(folder))
    run_dir = save_run(config, tmp_path / "run")
    monkeypatch.setattr(export, "FILE_BYTES", 10_000)
    out = export.export_run(run_dir, tmp_path / "out")
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 5 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    held = {name: path.name for path in files for name in load_file(path)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors(out).values())
    same(tensors(out), tensors(folder))
    assert torch.equal(load_hf_model(out)(TOKENS), load_hf_model(folder)(TOKENS))
    split = saved_peer("olmoe", tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    assert torch.equal(load_hf_model(tmp_path / "theirs")(TOKENS), load_hf_model(folder)(TOKENS))
    with torch.no_grad():
        again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
        assert torch.equal(again(TOKENS).logits, split(TOKENS).logits)


def test_the_tokenizer_goes_along(folders, tmp_path):
    folder, imported = folders("llama")
    config = configuration(imported / "model.toml")
    run_dir = save_run(config, tmp_path / "run")
    out = export.export_run(run_dir, tmp_path / "out")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(out), load_file_tokenizer(str(out))
    text = "A naïve test: 你好\n\t<|endoftext|> "
    assert ours.encode(text) == list(text.encode())
    assert theirs("héllo", add_special_tokens=False)["input_ids"] == list("héllo".encode())
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == theirs.eos_token_id == 256


def test_nothing_is_overwritten(folders, tmp_path):
    folder, imported = folders("llama")
    run_dir = save_run(configuration(imported / "model.toml"), tmp_path / "run")
    (tmp_path / "mine").mkdir()
    for write in (export.export_run, to_checkpoint.import_hf):
        with pytest.raises(ConfigError, match="mine: is there already"):
            write(run_dir if write is export.export_run else folder, tmp_path / "mine")
    (tmp_path / "new.part").mkdir()
    for write in (export.export_run, to_checkpoint.import_hf):
        with pytest.raises(ConfigError, match="new.part: is there already"):
            write(run_dir if write is export.export_run else folder, tmp_path / "new")
    assert not list((tmp_path / "mine").iterdir()) and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing (1 tensors in all)"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "q_proj.bias has no place in"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), "config.json implies"),
    ],
    ids=["missing", "extra", "shape"],
)
def test_tensors_that_do_not_fit_are_named(change, message, folders, tmp_path):
    folder, _ = folders("llama")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text((folder / "config.json").read_text())
    changed = tensors(folder)
    change(changed)
    save_file(changed, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_hf_model(tmp_path / "hf")
    assert message in str(caught.value)


def test_a_file_that_is_cut_off_is_named(folders, tmp_path):
    folder, _ = folders("llama")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="the weights cannot be read"):
        load_hf_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_hf_model(tmp_path)


def test_capped_logits_come_back_capped_and_are_not_exported(folders, tmp_path):
    _, imported = folders("llama")
    run_dir = save_run(configuration(imported / "model.toml", loss__soft_cap=0.5), tmp_path / "run")
    model = load_run_model(run_dir, device="cpu", dtype=torch.float32)
    largest = model(TOKENS).abs().max()
    assert 0.05 < largest < 0.5
    model.output.loss.soft_cap = 0.0
    assert model(TOKENS).abs().max() > largest
    with pytest.raises(ConfigError, match="loss.soft_cap = 0.5 of the run: no family"):
        export.export_run(run_dir, tmp_path / "out")
