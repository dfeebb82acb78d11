"""Every key a training TOML may hold: its type, its default and one line on what it means.

Section and key names are those of torchtitan 0.2.2 wherever the meaning is the same. The line under a field is its help
text (``--help`` and docs/configuration.md are generated from it). ``key(...)`` adds what a type cannot say:
bounds, and the *parent* a key depends on. A key with a parent is a **companion**: it is inert unless the parent has one
of the given values, so an ablation may change it together with its parent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def key(
    default: Any = None,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    parent: str = "",
    parent_values: tuple[Any, ...] = (),
    factory: Any = None,
) -> Any:
    """A dataclass field with a range and, for a companion key, the parent that makes it matter.

    ``parent`` is a full key ("compile.enable"); the field matters only while the parent holds one of ``parent_values``.
    """
    metadata = {"minimum": minimum, "maximum": maximum, "parent": parent, "parent_values": parent_values}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Job:
    config_file: str = ""
    """TOML file to train from."""
    description: str = ""
    """A sentence about the run, kept in its record."""
    dump_folder: str = "outputs"
    """Folder under which a new run directory is made: <dump_folder>/<file name>/<date>-<time>-<random>."""
    run_dir: str = ""
    """Exact run directory. Empty: a new one under dump_folder. One that holds another configuration is refused."""
    dry_run: bool = False
    """Print the resolved configuration with origins, parameters, FLOPs and memory, then stop. Touches no device."""


@dataclass
class Model:
    name: str = "llama3"
    """Model family: the group of flavors to choose from."""
    flavor: str = "debug"
    """Named shape within the family, see config/flavors.py."""
    hf_assets_path: str = ""
    """Folder with tokenizer.json (and tokenizer_config.json), used when data.tokenizer is "file"."""
    vocab_size: int | None = key(None, minimum=1)
    """Rows of the embedding. Unset: the flavor's. May exceed the tokenizer's vocabulary, never fall short of it."""
    dim: int | None = key(None, minimum=1)
    """Width of the residual stream. Unset: the flavor's."""
    n_layers: int | None = key(None, minimum=1)
    """Number of Transformer blocks. Unset: the flavor's."""
    n_heads: int | None = key(None, minimum=1)
    """Query heads. Unset: the flavor's."""
    n_kv_heads: int | None = key(None, minimum=1)
    """Key and value heads (GQA); divides n_heads. Unset: the flavor's."""
    head_dim: int | None = key(None, minimum=2)
    """Width of one head; even. Unset: the flavor's."""
    hidden_dim: int | None = key(None, minimum=1)
    """Width of the SwiGLU feed-forward layer. Unset: the flavor's."""
    max_seq_len: int | None = key(None, minimum=1)
    """Longest sequence the model allows. Unset: the flavor's."""
    rope_theta: float | None = key(None, minimum=1.0)
    """Base of the rotary frequencies. Unset: the flavor's."""
    norm_eps: float | None = key(None, minimum=0.0)
    """Epsilon of RMSNorm. Unset: the flavor's."""
    qk_norm: bool | None = None
    """RMSNorm on each query and key head before the rotary embedding. Unset: the flavor's."""
    enable_weight_tying: bool | None = None
    """Share the embedding matrix with the output head. Unset: the flavor's."""


@dataclass
class Attention:
    backend: Literal["auto", "sdpa", "sdpa_math"] = "auto"
    """Attention kernel. Only "auto" may fall back, and says what it chose. "sdpa_math" is the readable reference."""


_AUX_RULES = ("aux_loss", "global_aux_loss", "sequence_aux_loss")
_BIAS_RULES = ("bias_sign", "bias_proportional")


@dataclass
class Moe:
    """Mixture of experts. Inert unless the model's flavor has experts; see docs/moe.md."""

    num_experts: int | None = key(None, minimum=2)
    """Routed experts of a MoE layer. Unset: the flavor's."""
    top_k: int | None = key(None, minimum=1)
    """Experts that process a token; below num_experts. Unset: the flavor's."""
    hidden_dim: int | None = key(None, minimum=1)
    """Width of one routed expert. Unset: the flavor's."""
    num_shared_experts: int | None = key(None, minimum=0)
    """Experts that process every token, kept as one feed-forward layer of their joint width. Unset: the flavor's."""
    first_dense_layers: int | None = key(None, minimum=0)
    """Blocks at the bottom that keep a dense feed-forward layer of model.hidden_dim. Unset: the flavor's."""
    every_n_layers: int | None = key(None, minimum=1)
    """Above them, every n-th block (n, 2n, ... counted from 1) has experts, the others are dense. Unset: the flavor's."""
    score_func: Literal["softmax", "sigmoid"] | None = None
    """Router logits to scores. Unset: the flavor's."""
    route_norm: bool | None = None
    """Divide a token's top-k scores by their sum. Unset: the flavor's."""
    route_scale: float | None = key(None, minimum=0.0)
    """Factor on the routing weights. Unset: the flavor's."""
    num_groups: int | None = key(None, minimum=1)
    """Groups of experts for group-limited routing; divides num_experts. 1: none. Unset: the flavor's."""
    top_groups: int | None = key(None, minimum=1)
    """Groups a token may choose experts from, by the sum of each group's two best scores. Unset: the flavor's."""
    routing: Literal["token_choice", "expert_choice"] = "token_choice"
    """expert_choice: each expert takes its best tokens of a micro-batch. It sees the future: not for causal models in earnest."""
    router_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the router's product and scores."""
    experts: Literal["grouped_mm", "loop", "quack"] = "grouped_mm"
    """Expert kernels. loop: the readable reference. quack: CuTe DSL on Hopper. Same results."""
    balance: Literal[
        "none",
        "aux_loss",
        "global_aux_loss",
        "sequence_aux_loss",
        "bias_sign",
        "bias_proportional",
        "quantile",
        "forced_uniform",
        "random_logits",
        "forced_skew",
    ] = "aux_loss"
    """Balancing rule. The last three ignore the router's wish: round robin, random, or a fixed skew."""
    aux_loss_coeff: float = key(1e-2, minimum=0.0, parent="moe.balance", parent_values=_AUX_RULES)
    """Coefficient of the balance loss."""
    f_source: Literal["exact", "running", "previous_step"] = key(
        "running", parent="moe.balance", parent_values=("global_aux_loss",)
    )
    """Where the global load comes from: an extra forward pass, the micro-batches so far, or the step before."""
    bias_update_rate: float = key(1e-3, minimum=0.0, parent="moe.balance", parent_values=_BIAS_RULES)
    """Size u of a bias update."""
    bias_freeze_step: int | None = key(None, minimum=1, parent="moe.balance", parent_values=_BIAS_RULES)
    """Step after which the bias stays as it is. Unset: never."""
    extra_sequence_coeff: float = key(0.0, minimum=0.0, parent="moe.balance", parent_values=(*_BIAS_RULES, "quantile"))
    """Coefficient of a sequence balance loss beside the bias (DeepSeek-V3: 1e-4)."""
    quantile_preset: Literal["megatron", "kimi_k3", "custom"] = key(
        "kimi_k3", parent="moe.balance", parent_values=("quantile",)
    )
    """megatron: logits, mean of exact micro-batch quantiles. kimi_k3: sigmoid scores, histogram of the global batch."""
    quantile_score: Literal["logit", "sigmoid"] = key(
        "sigmoid", parent="moe.quantile_preset", parent_values=("custom",)
    )
    """What the bias is added to."""
    quantile_statistic: Literal["margin", "column"] = key(
        "margin", parent="moe.quantile_preset", parent_values=("custom",)
    )
    """margin: quantile of the token's threshold minus the score. column: of minus the score alone."""
    quantile_pool: Literal["microbatch_mean", "global"] = key(
        "global", parent="moe.quantile_preset", parent_values=("custom",)
    )
    """microbatch_mean: average the quantiles of micro-batches. global: one quantile over the global batch."""
    quantile_estimator: Literal["exact", "histogram"] = key(
        "exact", parent="moe.quantile_preset", parent_values=("custom",)
    )
    """histogram: 1000 bins an expert, interpolated. exact keeps every score of the step."""
    quantile_center: bool = key(True, parent="moe.quantile_preset", parent_values=("custom",))
    """Subtract the mean bias after each update."""
    quantile_ema: float = key(0.0, minimum=0.0, maximum=1.0, parent="moe.balance", parent_values=("quantile",))
    """Share of the old bias that each update keeps."""
    skew_strength: float = key(1.0, minimum=0.0, parent="moe.balance", parent_values=("forced_skew",))
    """Standard deviation of the fixed bias that forced_skew adds to the logits."""
    z_loss_coeff: float = key(0.0, minimum=0.0)
    """Coefficient of the router z-loss, the mean squared logsumexp of the logits (ST-MoE: 1e-3)."""
    coeff_decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of aux_loss_coeff, extra_sequence_coeff and z_loss_coeff."""
    coeff_decay_steps: int | None = key(None, minimum=1, parent="moe.coeff_decay", parent_values=("linear", "cosine"))
    """Length of that decay. Unset: training.steps."""
    coeff_final_factor: float = key(
        0.0, minimum=0.0, maximum=1.0, parent="moe.coeff_decay", parent_values=("linear", "cosine")
    )
    """Share of the coefficients that is left at its end."""
    jitter: float = key(0.0, minimum=0.0, maximum=1.0)
    """Multiply the router's input by U(1 - jitter, 1 + jitter) in training (Switch: 0.01)."""
    gumbel_tau: float = key(0.0, minimum=0.0)
    """Add this times Gumbel noise to the logits that choose experts, in training. Weights stay without noise."""
    gumbel_decay_steps: int | None = key(None, minimum=1)
    """Steps over which gumbel_tau falls to 0. Unset: constant."""
    capacity: Literal["none", "position", "score"] = "none"
    """Drop what exceeds an expert's capacity: the last tokens by position, or those of the lowest weight."""
    capacity_factor: float = key(1.25, minimum=0.0, parent="moe.capacity", parent_values=("position", "score"))
    """Capacity of an expert in units of the mean load of a micro-batch."""
    count_dtype: Literal["int64", "bfloat16"] = "int64"
    """Accumulator of expert loads. bfloat16 reproduces a published counting bug."""
    log_per_layer: bool = False
    """Log balance, dead experts and losses of every MoE layer, not only over layers."""


@dataclass
class Optimizer:
    name: Literal["AdamW", "Adam", "SGD"] = "AdamW"
    """Optimizer. SGD is plain (no momentum), for parity tests."""
    lr: float = key(8e-4, minimum=0.0)
    """Peak learning rate."""
    beta1: float = key(0.9, minimum=0.0, maximum=1.0, parent="optimizer.name", parent_values=("AdamW", "Adam"))
    """Decay of the first moment."""
    beta2: float = key(0.95, minimum=0.0, maximum=1.0, parent="optimizer.name", parent_values=("AdamW", "Adam"))
    """Decay of the second moment."""
    eps: float = key(1e-8, minimum=0.0, parent="optimizer.name", parent_values=("AdamW", "Adam"))
    """Added to the root of the second moment."""
    weight_decay: float = key(0.1, minimum=0.0)
    """Weight decay."""
    weight_decay_skip: list[Literal["norm", "bias", "embedding"]] = key(factory=list)
    """Kinds of parameter left out of weight decay. Empty: every parameter decays, as in torchtitan."""
    implementation: Literal["for-loop", "foreach", "fused"] = key(
        "fused", parent="optimizer.name", parent_values=("AdamW", "Adam")
    )
    """How the update is executed. SGD always runs foreach."""


@dataclass
class LRScheduler:
    warmup_steps: int = key(200, minimum=0)
    """Steps of linear warm-up. The first step's rate is above zero."""
    total_steps: int | None = key(None, minimum=1)
    """Length of the schedule. Unset: training.steps."""
    decay_ratio: float | None = key(None, minimum=0.0, maximum=1.0)
    """Share of the schedule spent decaying, after warm-up and a stable phase. Unset: decay begins after warm-up."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = key(0.0, minimum=0.0, maximum=1.0)
    """Rate at the end of the decay, as a share of optimizer.lr."""


@dataclass
class Training:
    steps: int = key(10000, minimum=1)
    """Optimizer steps to run."""
    seq_len: int = key(2048, minimum=1)
    """Tokens a sequence."""
    local_batch_size: int = key(8, minimum=1)
    """Sequences a rank runs in one forward and backward (one micro-batch)."""
    global_batch_size: int = key(-1, minimum=-1)
    """Sequences an optimizer step, over all ranks and micro-batches. -1: local_batch_size x data-parallel degree."""
    max_norm: float = key(1.0, minimum=0.0)
    """Clip the global gradient norm to this. 0: measure it, do not clip."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype. Master weights, gradients after reduction and optimizer states stay float32."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Dtype of gradient reductions under FSDP."""
    nonfinite_loss: Literal["stop", "skip"] = "stop"
    """On a NaN or infinite loss: stop and name the step and its documents, or skip the update and count it."""
    gc_freq: int = key(50, minimum=1)
    """Steps between runs of Python's garbage collector, which is off otherwise so that ranks pause together."""


@dataclass
class Data:
    corpus: Literal["python", "text", "hf", "mixture"] = "python"
    """python: the running Python's standard library. text: files at data.path. hf: data.name. mixture: data.sources."""
    path: str = key("", parent="data.corpus", parent_values=("text",))
    """File or folder of .txt, .jsonl or .parquet, each also as .gz or .xz (parquet excepted)."""
    name: str = key("", parent="data.corpus", parent_values=("hf",))
    """Data set for datasets.load_dataset(streaming=True): a hub name or a local folder."""
    subset: str = key("", parent="data.corpus", parent_values=("hf",))
    """Configuration of the data set ("en" of "allenai/c4")."""
    split: str = key("train", parent="data.corpus", parent_values=("hf",))
    """Split of the data set."""
    text_field: str = key("text", parent="data.corpus", parent_values=("text", "hf"))
    """Field that holds a row's text, in .jsonl, .parquet and data sets."""
    roots: list[str] = key(factory=list, parent="data.corpus", parent_values=("python",))
    """More folders of .py, .md, .rst and .txt files for the python corpus; "site-packages" is the interpreter's own."""
    sources: list[dict[str, Any]] = key(factory=list, parent="data.corpus", parent_values=("mixture",))
    """Tables of a mixture: the keys of [data] that name a corpus, and weight (> 0)."""
    holdout_percent: float = key(5.0, minimum=0.0, maximum=50.0)
    """Share of documents, chosen by a hash of their text, kept out of training for validation."""
    tokenizer: Literal["auto", "bytes", "bpe", "file"] = "auto"
    """auto: file if model.hf_assets_path is set, else bpe. bpe is trained on the corpus once and cached."""
    tokenizer_vocab_size: int = key(4096, minimum=257, parent="data.tokenizer", parent_values=("auto", "bpe"))
    """Vocabulary of the trained BPE, special tokens included."""
    packing: Literal["split_fill"] = "split_fill"
    """split_fill: documents end to end, cut every seq_len tokens; no token is lost and none is padding."""
    document_mask: bool = False
    """Keep attention within a document, with positions that restart at its start."""
    mask_boundary_labels: bool = False
    """Leave out of the loss the label that is the first token of the next document."""
    prefetch_steps: int = key(2, minimum=0)
    """Steps prepared ahead by a background thread. 0: none. Never changes the data."""
    cache_dir: str = ""
    """Folder for trained tokenizers and tokenised corpora. Empty: ~/.cache/ablation-trainer (or XDG_CACHE_HOME)."""


@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = key(1, minimum=1)
    """Ranks that hold whole copies. Alone: DDP. With a shard degree above 1: HSDP."""
    data_parallel_shard_degree: int = key(-1, minimum=-1)
    """Ranks that shard parameters (FSDP2). -1: the ranks that are left over. 1: none."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free unsharded parameters after forward. default: always."""


@dataclass
class ActivationCheckpoint:
    mode: Literal["none", "full", "selective"] = "none"
    """none; full: recompute every block; selective: see selective_ac_option."""
    selective_ac_option: str = key("2", parent="activation_checkpoint.mode", parent_values=("selective",))
    """A number n: recompute every n-th block whole. "op": keep costly operators, recompute the rest."""


@dataclass
class Compile:
    enable: bool = False
    """torch.compile, per Transformer block."""
    components: list[Literal["model", "loss"]] = key(
        factory=lambda: ["model", "loss"], parent="compile.enable", parent_values=(True,)
    )
    """What to compile."""
    backend: str = key("inductor", parent="compile.enable", parent_values=(True,))
    """torch.compile backend."""


@dataclass
class Validation:
    enable: bool = False
    """Evaluate on held-out documents at step 0, every freq steps and at the end."""
    freq: int = key(10, minimum=1, parent="validation.enable", parent_values=(True,))
    """Steps between validations."""
    steps: int = key(-1, minimum=-1, parent="validation.enable", parent_values=(True,))
    """Batches of local_batch_size sequences, shared by the ranks: the same tokens on any mesh. -1: all held out."""
    local_batch_size: int = key(8, minimum=1, parent="validation.enable", parent_values=(True,))
    """Sequences a rank evaluates at once."""


@dataclass
class Metrics:
    log_freq: int = key(10, minimum=1)
    """Steps between log lines. The device is synchronised at these steps only."""
    enable_tensorboard: bool = True
    """Write TensorBoard events."""
    save_tb_folder: str = key("tb", parent="metrics.enable_tensorboard", parent_values=(True,))
    """Folder of the events, inside the run directory."""
    disable_color_printing: bool = False
    """Never colour the console. Colour is used on a terminal only."""


@dataclass
class Comm:
    init_timeout_seconds: int = key(300, minimum=1)
    """Longest wait for a collective until the first step is done."""
    train_timeout_seconds: int = key(100, minimum=1)
    """Longest wait for a collective after the first step."""


@dataclass
class Debug:
    seed: int = key(0, minimum=0)
    """Sets init_seed, data_seed and noise_seed."""
    init_seed: int | None = key(None, minimum=0)
    """Seed of the initial weights. Unset: seed."""
    data_seed: int | None = key(None, minimum=0)
    """Seed of the order of the data. Unset: seed."""
    noise_seed: int | None = key(None, minimum=0)
    """Seed of routing noise, random and forced routing. Unset: seed."""
    deterministic: bool = False
    """Deterministic algorithms only; the same run twice is bit-identical on one machine."""
    deterministic_warn_only: bool = key(False, parent="debug.deterministic", parent_values=(True,))
    """Warn about operators without a deterministic implementation instead of failing."""


@dataclass
class Config:
    """One training run, section by section."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    attention: Attention = field(default_factory=Attention)
    moe: Moe = field(default_factory=Moe)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)


@dataclass
class Decide:
    """When and by what the arms of an ablation are judged."""

    metric: str = "validation_metrics/loss"
    """Tag of metrics.jsonl that decides."""
    step: int = key(0, minimum=0)
    """Step at which it is read. 0: the last step."""
    equivalent_within: float | None = key(None, minimum=0.0)
    """Difference, in the metric's unit, below which two arms count as equivalent. Unset: never called equivalent."""


@dataclass
class Ablation:
    """The [ablation] table of an ablation file. Not part of a run's configuration: one file holds many runs."""

    question: str = ""
    """The question the arms answer, as a sentence."""
    hypothesis: str = ""
    """What is expected, written before the runs."""
    variable: str | list[str] = ""
    """Full key that the arms differ in (its companions may follow), or a list of keys for a factorial or ladder."""
    baseline: str = ""
    """Arm that the others are compared with."""
    references: list[str] = key(factory=list)
    """Arms that are drawn but never ranked."""
    expected: Literal["loss-changing", "loss-neutral"] = "loss-changing"
    """loss-neutral: a loss outside the noise band is reported as a violated expectation."""
    seeds: list[int] = key(factory=list)
    """Values of debug.seed, the same for every arm."""
    aa: bool = False
    """Run the baseline again, on disjoint seeds and on the same ones, to measure the noise bands."""
    runs_on: dict[str, Any] = key(factory=dict)
    """Machines the question is meant for, as in { gpus = [2, 8] }; refused elsewhere unless asked for."""
    n1_ok: bool = False
    """Allow a single seed; every figure is then marked n = 1."""
    design: Literal["", "factorial", "ladder"] = ""
    """factorial: every combination of the arms is an arm. ladder: each arm adds one change to the last."""
    tune: dict[str, list[Any]] = key(factory=dict)
    """Full key -> grid of values tried for every arm; arms are compared best to best."""
    hold: dict[str, str] = key(factory=dict)
    """Full key -> derived quantity that the key keeps equal in every arm while the variable moves, as in
    { "training.global_batch_size" = "tokens_per_step" } under training.seq_len; only such keys may follow."""
    decide: Decide = field(default_factory=Decide)
