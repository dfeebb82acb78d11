"""torchtitan 0.2.2's own trainer on our reference shapes; every figure is its own log line.

Launched by torchrun with torchtitan 0.2.2 first on PYTHONPATH (benchmarks/side_torchtitan.py does this). Registers
shapes and hands over to torchtitan's entry point.
"""

import runpy

from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.moe import MoEArgs
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

# Llama-3.2-1B with an untied head, 1.50 B: our llama3/1B_untied.
llama3_args["1B_untied"] = TransformerModelArgs(
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    ffn_dim_multiplier=1.5,
    multiple_of=256,
    rope_theta=500000,
    vocab_size=128256,
    max_seq_len=8192,
)

# 6.84 B parameters, 1.21 B of them active: our moe/moe_7b_a1b. Experts are balanced by the bias of MoEArgs' default.
qwen3_args["moe_7b_a1b"] = Qwen3ModelArgs(
    vocab_size=32000,
    max_seq_len=4096,
    head_dim=128,
    dim=2048,
    n_layers=16,
    n_heads=16,
    n_kv_heads=16,
    qk_norm=True,
    hidden_dim=8192,
    norm_eps=1e-5,
    rope_theta=500000,
    moe_enabled=True,
    moe_inter_dim=1024,
    moe_args=MoEArgs(
        num_experts=64,
        num_shared_experts=0,
        top_k=8,
        score_func="softmax",
        route_norm=False,
        route_scale=1.0,
        score_before_experts=False,
    ),
)

if __name__ == "__main__":
    runpy.run_module("torchtitan.train", run_name="__main__")
