"""Context-parallel layouts that are refused. What an attention backend can do of it is in config/attention.py."""

from config.context import context_layout, context_pieces
from config.refusal import Refusal, Said, tensor_parallel, together
from config.schema import Config
from config.shapes import ModelShape

METHOD, DEGREE = "parallelism.context_parallel_method", "parallelism.context_parallel_degree"
TENSOR = "parallelism.tensor_parallel_degree"


def context_parallel(config: Config) -> bool:
    """Whether ranks share sequences."""
    return config.parallelism.context_parallel_degree > 1


def _uneven(config: Config, shape: ModelShape, said: Said) -> str:
    section, pieces = config.parallelism, context_pieces(config.parallelism)
    if not context_parallel(config) or config.training.seq_len % pieces == 0:
        return ""
    twice = " x 2" if context_layout(section) == "zigzag" else ""
    return f"{said('training.seq_len')} is not divisible by {said(DEGREE)}{twice}, {pieces} pieces"


def _uneven_tensor(config: Config, shape: ModelShape, said: Said) -> str:
    section, length = config.parallelism, config.training.seq_len
    n, t = section.context_parallel_degree, section.tensor_parallel_degree
    if not context_parallel(config) or not tensor_parallel(config) or length % n or length // n % t == 0 or length % t:
        return ""
    share = f"{said('training.seq_len')} is {length // n} tokens a rank with {said(DEGREE)}"
    return f"{share}, not divisible by {said(TENSOR)}"


def _heads(config: Config, shape: ModelShape) -> tuple[int, int]:
    """Query heads and key and value heads on a rank, before the exchange."""
    t = config.parallelism.tensor_parallel_degree
    return shape.n_heads // t, shape.n_kv_heads // t


def _ulysses(config: Config, shape: ModelShape) -> bool:
    """Whether heads are exchanged, and tensor parallelism shares them out (it is refused by itself otherwise)."""
    t = config.parallelism.tensor_parallel_degree
    exchanged = context_parallel(config) and config.parallelism.context_parallel_method == "ulysses"
    return exchanged and not shape.n_heads % t and not shape.n_kv_heads % t


def _few_heads(config: Config, shape: ModelShape, said: Said) -> str:
    heads, n = _heads(config, shape)[0], config.parallelism.context_parallel_degree
    if not _ulysses(config, shape) or heads % n == 0:
        return ""
    shared = f" with {said(TENSOR)}, {heads} heads a rank," if tensor_parallel(config) else ""
    return f"{said('model.n_heads')}{shared} is not divisible by {said(DEGREE)} with {said(METHOD)}"


def _few_kv_heads(config: Config, shape: ModelShape, said: Said) -> str:
    (heads, kv_heads), n = _heads(config, shape), config.parallelism.context_parallel_degree
    if not _ulysses(config, shape) or heads % n or kv_heads % n == 0 or n % kv_heads == 0:
        return ""
    shared = f" with {said(TENSOR)}, {kv_heads} heads a rank," if tensor_parallel(config) else ""
    return f"{said('model.n_kv_heads')}{shared} neither divides nor is a multiple of {said(DEGREE)} with {said(METHOD)}"


def _cut_choices(config: Config, shape: ModelShape, said: Said) -> str:
    """Quote what experts decide over a whole micro-batch, of which each rank has a part."""
    moe = config.moe
    if not context_parallel(config) or shape.moe is None:
        return ""
    by_micro_batch = moe.balance == "quantile" and (
        moe.quantile_preset == "megatron" or (moe.quantile_preset, moe.quantile_pool) == ("custom", "microbatch_mean")
    )
    decided = {
        "moe.capacity": moe.capacity != "none",
        "moe.routing": moe.routing == "expert_choice",
        "moe.quantile_preset": by_micro_batch,
    }
    found = [said(key) for key, is_decided in decided.items() if is_decided]
    return f"{' and '.join(found)} with {said(DEGREE)}" if found else ""


CONTEXT_PARALLEL = (
    Refusal(
        "CP, sequence not divisible",
        "every rank holds equal pieces of each sequence, one, or an early and a late one (zigzag). Choose a multiple.",
        _uneven,
    ),
    Refusal(
        "CP with TP, sequence not divisible",
        "between matrices the ranks of a tensor-parallel group share what a context rank holds. Choose a multiple.",
        _uneven_tensor,
    ),
    Refusal(
        "Ulysses, n_heads not divisible",
        "each rank attends with whole heads. Choose a degree that divides them, or the method ring or allgather.",
        _few_heads,
    ),
    Refusal(
        "Ulysses, n_kv_heads do not share out",
        "each rank has equally many key and value heads, its own or copies of one. Choose another degree, or the method"
        " ring or allgather.",
        _few_kv_heads,
    ),
    Refusal(
        "CP with ZeRO 0 or 1",
        "parameters are sharded over the ranks that share sequences (FSDP2), whose gradients are summed all the same."
        " Use stage 2 or 3; for whole copies of such groups, data_parallel_replicate_degree.",
        together(
            lambda config, shape: context_parallel(config) and config.parallelism.zero_stage in (0, 1),
            "context_parallel_degree",
            "zero_stage",
        ),
    ),
    Refusal(
        "CP with FSDP1",
        "it is a legacy arm for data parallelism alone. Use fsdp_version = 2.",
        together(
            lambda config, shape: context_parallel(config) and config.parallelism.fsdp_version == 1,
            "context_parallel_degree",
            "fsdp_version",
        ),
    ),
    Refusal(
        "CP that cuts what experts decide together",
        "it is decided over all tokens of a micro-batch, and each rank has a part of every sequence. Use another rule,"
        ' such as moe.capacity = "none" or a quantile pooled over the global batch.',
        _cut_choices,
    ),
)
