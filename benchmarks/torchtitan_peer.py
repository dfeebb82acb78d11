"""torchtitan 0.2.2's own trainer on our reference shapes; every figure is its own log line.

Launched by torchrun with torchtitan 0.2.2 first on PYTHONPATH (benchmarks/compare.py does this). Registers a shape and
hands over to torchtitan's entry point.
"""

import runpy

from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.args import TransformerModelArgs

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

if __name__ == "__main__":
    runpy.run_module("torchtitan.train", run_name="__main__")
