"""Small models of every kind that text is generated from, with weights that make each token matter."""

from dataclasses import replace
from typing import Any

import torch

from config.schema import Moe
from config.shapes import ModelShape, MoEShape
from model.attention import attention_backend
from model.balance import balances
from model.decoder import Decoder

VOCABULARY, LONGEST = 61, 48
DENSE = ModelShape(VOCABULARY, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=48, max_seq_len=LONGEST)
EXPERTS = MoEShape(num_experts=8, top_k=2, hidden_dim=16)
SHAPES = {
    "grouped_queries": DENSE,
    "one_query_a_key": replace(DENSE, n_kv_heads=4),
    "tied": replace(DENSE, enable_weight_tying=True),
    "qk_norm": replace(DENSE, qk_norm=True, head_dim=16),
    "qk_norm_of_the_projection": replace(DENSE, qk_norm=True, qk_norm_scope="projection"),
    "moe": replace(DENSE, moe=EXPERTS),
    "moe_sigmoid_shared": replace(
        DENSE,
        moe=replace(EXPERTS, score_func="sigmoid", route_norm=True, num_shared_experts=1, num_groups=4, top_groups=2),
    ),
}


def decoder(shape: ModelShape, **moe: Any) -> Decoder:
    """An eval-mode model; ``moe`` are keys of [moe]."""
    model = Decoder(shape, attention_backend("sdpa"), LONGEST, Moe(**moe)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 1.0 if "norm" in name else parameter.shape[-1] ** -0.5, generator=generator)
        for balance in balances(model).values():
            if balance.bias is not None:
                balance.bias.normal_(0.0, 0.2, generator=generator)
    return model.requires_grad_(False)
