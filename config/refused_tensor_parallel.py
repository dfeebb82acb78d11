"""Tensor-parallel layouts that are refused."""

from config.refusal import Refusal, compares_operators, compiled, compiles, does_not_divide, tensor_parallel, together

TENSOR_PARALLEL = (
    Refusal(
        "TP, n_heads not divisible",
        "each rank computes whole heads. Choose a degree that divides the heads.",
        does_not_divide("model.n_heads", lambda config, shape: shape.n_heads),
    ),
    Refusal(
        "TP, n_kv_heads not divisible",
        "each rank holds whole key and value heads; copying them would make their gradients partial sums. Choose a"
        " flavor with more of them, or a lower degree.",
        does_not_divide("model.n_kv_heads", lambda config, shape: shape.n_kv_heads),
    ),
    Refusal(
        "TP, feed-forward width not divisible",
        "each rank holds an equal share of the hidden features. Choose another width, or a degree that divides it.",
        does_not_divide("model.hidden_dim", lambda config, shape: shape.hidden_dim),
    ),
    Refusal(
        "TP, expert width not divisible",
        "each rank holds an equal share of every expert's hidden features. Choose another width or degree.",
        does_not_divide("moe.hidden_dim", lambda config, shape: shape.moe.hidden_dim if shape.moe else 0),
    ),
    Refusal(
        "TP, vocabulary not divisible",
        "embedding, head and loss are split by equal shares of the vocabulary. Pad model.vocab_size to a multiple.",
        does_not_divide("model.vocab_size", lambda config, shape: shape.vocab_size),
    ),
    Refusal(
        "TP, sequence not divisible",
        "between matrices each rank holds an equal share of the sequence. Choose a multiple.",
        does_not_divide("training.seq_len", lambda config, shape: config.training.seq_len),
    ),
    Refusal(
        "asynchronous TP without torch.compile (inductor)",
        "it is the compiler that takes products and collectives apart. Set compile.enable = true, with"
        ' compile.backend = "inductor" and "model" in compile.components.',
        together(
            lambda config, shape: (
                config.parallelism.enable_async_tensor_parallel and tensor_parallel(config) and not compiled(config)
            ),
            "enable_async_tensor_parallel",
            "compile.enable",
            "compile.backend",
        ),
    ),
    Refusal(
        "TP with compiled blocks and checkpointing by operator",
        "torch 2.13 hands the backward pass of such a block a DeviceMesh where it expects a tensor, and stops. Set"
        ' activation_checkpoint.mode = "full" or a number of blocks, or compile.components = ["loss"].',
        together(
            lambda config, shape: tensor_parallel(config) and compiles(config, "model") and compares_operators(config),
            "tensor_parallel_degree",
            "compile.enable",
            "activation_checkpoint.selective_ac_option",
        ),
    ),
)
