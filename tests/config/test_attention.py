"""Which attention kernel a configuration may have, and what "auto" takes."""

from pathlib import Path

import pytest

from config.attention import AUTO, KERNELS, Choice, Machine, choose_attention
from config.errors import ConfigError
from config.flavors import resolve_shape
from config.load import load_file
from config.schema import Config

H200 = Machine("cuda", 9)
WITHOUT_PACKAGES = Machine("cuda", 9, {"flash2": "ImportError: no", "flash4": "ModuleNotFoundError: no flash_attn"})


def config(**keys: object) -> Config:
    made = Config()
    for full, value in {"model.head_dim": 64, **keys}.items():
        section, name = full.replace("__", ".").split(".")
        setattr(getattr(made, section), name, value)
    return made


def choose(machine: Machine, **keys: object) -> Choice:
    made = config(**keys)
    return choose_attention(made, resolve_shape(made.model, made.moe), machine)


def refused(tmp_path, **keys: object) -> str:
    path = tmp_path / "a.toml"
    path.write_text("")
    with pytest.raises(ConfigError) as error:
        load_file(path, {"model.head_dim": 64, **{k.replace("__", "."): v for k, v in keys.items()}})
    return str(error.value)


@pytest.mark.parametrize(
    "machine, keys, name",
    [
        (Machine("cpu"), {}, "sdpa"),
        (Machine("cpu"), {"data__document_mask": True}, "sdpa"),
        (H200, {}, "flash4"),
        (H200, {"data__document_mask": True}, "flash4"),
        (WITHOUT_PACKAGES, {}, "sdpa_cudnn"),
        (WITHOUT_PACKAGES, {"data__document_mask": True}, "flex"),
        (WITHOUT_PACKAGES, {"debug__deterministic": True}, "sdpa_flash"),
        (WITHOUT_PACKAGES, {"model__head_dim": 192}, "sdpa_flash"),
        (H200, {"model__head_dim": 20}, "sdpa"),
        (H200, {"model__head_dim": 20, "data__document_mask": True}, "flex"),
        (
            H200,
            {"model__head_dim": 8, "data__document_mask": True, "training__mixed_precision_param": "float32"},
            "sdpa",
        ),
        (H200, {"training__mixed_precision_param": "float32"}, "sdpa"),
        (H200, {"parallelism__context_parallel_degree": 2}, "flash4"),
        (H200, {"parallelism__context_parallel_degree": 2, "data__document_mask": True}, "sdpa"),
        (
            H200,
            {
                "parallelism__context_parallel_degree": 2,
                "parallelism__context_parallel_method": "ulysses",
                "data__document_mask": True,
            },
            "flash4",
        ),
        (Machine("cuda", 8), {}, "sdpa_cudnn"),
        (Machine("cuda", 7), {}, "sdpa"),
        (Machine("cuda", 10), {"model__head_dim": 192}, "sdpa_flash"),
        (Machine("cuda", 12), {"data__document_mask": True}, "flex"),
    ],
)
def test_auto_is_a_function_of_configuration_and_machine(machine, keys, name):
    assert choose(machine, **keys).name == name


def test_auto_says_what_it_passed_over_and_why():
    choice = choose(WITHOUT_PACKAGES, data__document_mask=True)
    assert choice.notes() == [
        'attention.backend = "auto" is flex here: flash4 needs flash-attn-4, which cannot be imported'
        " (ModuleNotFoundError: no flash_attn)."
    ]
    assert choose(H200).notes() == choose(Machine("cpu")).notes() == []


@pytest.mark.parametrize("name", list(KERNELS))
def test_a_kernel_that_is_asked_for_is_taken_or_refused_and_never_replaced(name):
    assert choose(H200, attention__backend=name) == Choice(name)
    if KERNELS[name].cpu:
        assert choose(Machine("cpu"), attention__backend=name) == Choice(name)
        return
    with pytest.raises(ConfigError) as error:
        choose(Machine("cpu"), attention__backend=name)
    assert str(error.value) == (
        f'attention.backend = "{name}" needs a GPU to train. Backends that run here: sdpa, sdpa_math.'
    )


@pytest.mark.parametrize("name", ["flash2", "flash4"])
def test_a_missing_package_names_the_extra(name):
    with pytest.raises(ConfigError) as error:
        choose(WITHOUT_PACKAGES, attention__backend=name)
    package = {"flash2": "flash-attn", "flash4": "flash-attn-4"}[name]
    assert f'attention.backend = "{name}" needs {package}, which cannot be imported (' in str(error.value)
    assert 'pip install -e ".[flash]"' in str(error.value)
    assert "sdpa, sdpa_math, sdpa_flash, sdpa_cudnn, flex" in str(error.value)


def test_a_gpu_that_is_too_old_or_too_new_is_named():
    for machine, words in ((Machine("cuda", 8), "compute capability 9 to 11"), (Machine("cuda", 12), "GPU has 12")):
        with pytest.raises(ConfigError, match=words):
            choose(machine, attention__backend="flash4")
    with pytest.raises(ConfigError, match="at most 128 features on this GPU"):
        choose(Machine("cuda", 10), attention__backend="flash4", model__head_dim=192)


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn"])
def test_document_masks_are_refused_by_name(tmp_path, name):
    message = refused(tmp_path, attention__backend=name, data__document_mask=True)
    assert f'attention.backend = "{name}"' in message and "knows no document masks" in message
    assert message.endswith("Backends that fit this configuration: sdpa, sdpa_math, flex, flash2, flash4.")


def test_blocks_of_keys_are_refused_by_name(tmp_path):
    over_ranks = {"parallelism__context_parallel_degree": 2}
    assert "cannot attend block by block" in refused(tmp_path, attention__backend="flex", **over_ranks)
    message = refused(tmp_path, attention__backend="flash4", data__document_mask=True, **over_ranks)
    assert "takes no masks block by block, as ring attends" in message and message.endswith(": sdpa, sdpa_math.")


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_cudnn", "flash2", "flash4"])
def test_float32_is_refused_by_name(tmp_path, name):
    message = refused(tmp_path, attention__backend=name, training__mixed_precision_param="float32")
    assert "computes in bfloat16" in message and message.endswith("sdpa, sdpa_math, flex.")


@pytest.mark.parametrize(
    "name, head_dim, words",
    [
        ("sdpa_cudnn", 192, "8 to 128 features, in multiples of 8"),
        ("sdpa_flash", 20, "8 to 256"),
        ("flash2", 512, "8 to 256"),
        ("flash4", 12, "8 to 256"),
        ("flex", 8, "16 to 256 features"),
    ],
)
def test_widths_of_heads_are_refused_by_name(tmp_path, name, head_dim, words):
    assert words in refused(tmp_path, attention__backend=name, model__head_dim=head_dim)


def test_cudnn_is_refused_under_deterministic_algorithms(tmp_path):
    assert "no deterministic backward" in refused(tmp_path, attention__backend="sdpa_cudnn", debug__deterministic=True)


def test_the_page_has_the_table():
    page = (Path(__file__).parents[2] / "docs" / "attention.md").read_text()
    rows = {cells[0].strip(" `"): cells for line in page.splitlines() if (cells := line.strip("| ").split(" | "))[7:]}
    assert list(rows)[1:] == list(KERNELS)
    for name, kernel in KERNELS.items():
        _, title, runs_on, dtype, head_dim, documents, blocks, deterministic = rows[name]
        assert title == kernel.title and kernel.cpu == runs_on.startswith("CPU")
        assert kernel.cpu or f"capability {kernel.capability[0]}" in runs_on
        assert kernel.float32 == (dtype == "any") and kernel.document_mask == (documents != "refused")
        low, high, unit = kernel.head_dim
        assert kernel.cpu or head_dim.startswith(f"{low} to {high}" + f", by {unit}" * (unit > 1))
        assert blocks == {"masked": "reference blocks", "plain": "whole sequences", "": "refused"}[kernel.blocks]
        assert kernel.deterministic == (deterministic != "refused")


def test_orders_of_auto_end_with_a_kernel_that_fits_everything():
    for order in AUTO.values():
        last = KERNELS[order[-1]]
        assert last.cpu and last.float32 and last.document_mask and last.head_dim[1] > 1024
