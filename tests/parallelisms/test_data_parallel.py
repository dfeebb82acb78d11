"""FSDP2 beyond parity: the dtype of what is gathered and reduced, and how far ahead blocks are gathered."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from config.flavors import resolve_shape
from model.attention import attention_backend
from model.decoder import Decoder
from parallelisms.data_parallel import apply_fsdp
from parallelisms.names import named_parameters
from tests import ranks
from tests.fingerprint import Traffic, axes_of
from tests.parallelisms.test_parity_data import tiny
from tests.parallelisms.test_parity_moe import sparse
from tests.parallelisms.test_zero import built


def reduced_and_gathered(config) -> tuple[dict[str, int], dict[str, int]]:
    """Elements of each parameter in a group of shards, and bytes by kind that one micro-batch sends over it."""
    mesh, model, step, batch = built(config)
    with Traffic(axes_of(mesh)) as traffic:
        step.forward_backward(batch)
    sent = {kind: found["bytes"] for kind, found in traffic.summary()["dp_shard"].items()}
    return {name: p.to_local().numel() * mesh.dp_shard for name, p in named_parameters(model)}, sent


@pytest.mark.parametrize("router", ["float32", "bfloat16"])
def test_gradients_are_reduced_in_float32_and_routers_gathered_in_their_own_dtype(router):
    config = sparse(
        moe__router_dtype=router, training__mixed_precision_param="bfloat16", training__global_batch_size=4,
        parallelism__zero_stage=2,
    )  # fmt: skip
    elements, sent = ranks.run(2, reduced_and_gathered, config)[0]
    routers = sum(n for name, n in elements.items() if ".router." in name)
    assert routers > 0 and sent["reduce_scatter"] == 4 * sum(elements.values())
    assert sent["all_gather"] == 2 * sum(elements.values()) + (2 * routers if router == "float32" else 0)


def test_a_tied_matrix_is_sent_once_under_tensor_parallelism():
    """Cutting embedding and head makes two parameters of one; as two units of FSDP2 it would travel twice."""
    config = tiny(
        model__enable_weight_tying=True, model__n_kv_heads=2, training__mixed_precision_param="float32",
        training__global_batch_size=4, parallelism__tensor_parallel_degree=2, parallelism__zero_stage=2,
    )  # fmt: skip
    elements, sent = ranks.run(4, reduced_and_gathered, config)[0]
    assert sent["all_gather"] == sent["reduce_scatter"] == 4 * sum(elements.values())


def gathered_ahead(depth: int | None) -> tuple[list[int], list[int]]:
    """All-gathers that have begun when each of five blocks computes, forward and then backward."""
    mesh, model, step, batch = built(
        tiny(model__n_layers=5, training__global_batch_size=4, parallelism__fsdp_prefetch_blocks=depth)
    )
    counts: list[int] = []
    with Traffic(axes_of(mesh)) as traffic:

        def count(*_) -> None:
            counts.append(traffic.summary()["dp_shard"]["all_gather"]["calls"])

        for block in model.layers.children():
            block.attention_norm.register_forward_hook(count)
            block.ffn_norm.register_full_backward_hook(count)
        step.forward_backward(batch)
    return counts[:5], counts[5:]


@pytest.mark.parametrize("depth", [None, 2])
def test_blocks_are_gathered_as_far_ahead_as_asked(depth):
    forward, backward = ranks.run(2, gathered_ahead, depth)[0]
    # The embedding and five blocks, then the head, which is kept and which the last block calls for if any are asked
    # for; five blocks once more, in backward, where FSDP2 by itself gathers one unit ahead.
    assert forward == [min(2 + i + (depth or 0), 6) for i in range(4)] + [7 if depth else 6]
    assert backward == [min(8 + i + (depth or 1), 12) for i in range(5)]


def offload_policies() -> list[bool]:
    """Of each unit of a model on the meta device, whether its shards are told to live in CPU memory."""
    config = sparse()
    with torch.device("meta"):
        shape = resolve_shape(config.model, config.moe)
        model = Decoder(shape, attention_backend("sdpa"), max_positions=32, moe=config.moe)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "router_dtype"), torch.float32)
    apply_fsdp(model, mesh, reshard_after_forward="default", cpu_offload=True, **dtypes)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]
    return [all(parameter.offload_to_cpu for parameter in group.fsdp_params) for group in groups]


def test_cpu_offload_is_of_every_unit():
    """Embedding, blocks, their routers, norm and head. A CPU has no such copies: tests on GPUs see what they train."""
    found = ranks.run(2, offload_policies)[0]
    assert len(found) > 4 and all(found)
