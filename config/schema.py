"""Every key a training TOML may hold: its type, its default and one line on what it means.

Section and key names are those of torchtitan 0.2.2 wherever the meaning is the same. The line under a field is its help
text (``--help`` and docs/configuration.md are generated from it). ``key(...)`` adds what a type cannot say:
bounds, and the *parent* a key depends on. A key with a parent is a **companion**: it is inert unless the parent has one
of the given values, so an ablation may change it together with its parent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from config.ablation_schema import Ablation as Ablation
from config.ablation_schema import Decide as Decide
from config.field import key
from config.loss_schema import Liger, Loss
from config.memory_schema import ActivationCheckpoint
from config.moe_schema import Moe
from config.parallelism_schema import Parallelism
from config.precision_schema import Compile, Optimizer, Quantize
from config.profiling_schema import Profiling


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
    hf_assets_path: str = key("", parent="data.tokenizer", parent_values=("auto", "file"))
    """Folder with tokenizer.json (and tokenizer_config.json)."""
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
    converters: list[str] = key(factory=list)
    """What multiplies in float8. "quantize.linear.float8": linear layers. "quantize.grouped_mm.float8": experts."""


@dataclass
class Attention:
    backend: Literal["auto", "sdpa", "sdpa_math", "sdpa_flash", "sdpa_cudnn", "flex", "flash2", "flash4"] = "auto"
    """Attention kernel (docs/attention.md). Only "auto" may fall back, and says so. "sdpa_math" is the reference."""


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
    enable_cpu_offload: bool = False
    """Keep FSDP2's shards of parameters and gradients in CPU memory, with optimizer states, and update them there."""
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
    packing: Literal["split_fill", "next_fit", "first_fit_decreasing", "padded"] = "split_fill"
    """split_fill: documents end to end, cut every seq_len tokens. The others keep documents whole, and pad."""
    document_mask: bool = False
    """Keep attention within a document, with positions that restart at its start."""
    mask_boundary_labels: bool = False
    """Leave out of the loss the label that is the first token of the next document."""
    prefetch_steps: int = key(2, minimum=0)
    """Steps prepared ahead by a background thread. 0: none. Never changes the data."""
    cache_dir: str = ""
    """Folder for trained tokenizers and tokenised corpora. Empty: ~/.cache/ablation-trainer (or XDG_CACHE_HOME)."""


@dataclass
class Checkpoint:
    enable: bool = False
    """Save checkpoints, and continue from the newest complete one when the run directory holds any."""
    folder: str = key("checkpoint", parent="checkpoint.enable", parent_values=(True,))
    """Folder inside the run directory."""
    interval: int = key(500, minimum=1, parent="checkpoint.enable", parent_values=(True,))
    """Steps between checkpoints; the last step is always saved."""
    enable_first_step_checkpoint: bool = key(False, parent="checkpoint.enable", parent_values=(True,))
    """Save after step 1 too, to find out early that saving fails."""
    keep_latest_k: int = key(10, minimum=0, parent="checkpoint.enable", parent_values=(True,))
    """Checkpoints to keep; older ones are deleted once a newer one is complete. 0: all."""
    async_mode: Literal["disabled", "async"] = key("disabled", parent="checkpoint.enable", parent_values=(True,))
    """async: copy to CPU memory, go on training, write in the background."""
    load_step: int = key(-1, minimum=-1, parent="checkpoint.enable", parent_values=(True,))
    """Step to continue from. -1: the newest complete checkpoint, if there is one."""
    initial_load_path: str = key("", parent="checkpoint.enable", parent_values=(True,))
    """A checkpoint (a step-<n> folder) to take weights from when the run directory holds none yet."""
    initial_load_in_hf: bool = key(False, parent="checkpoint.enable", parent_values=(True,))
    """initial_load_path is a Hugging Face folder: config.json, safetensors. See docs/interchange.md."""
    last_save_in_hf: bool = key(False, parent="checkpoint.enable", parent_values=(True,))
    """Write the last checkpoint as a Hugging Face folder too, step-<n>-hf beside it."""
    export_dtype: Literal["float32", "bfloat16"] = key(
        "float32", parent="checkpoint.last_save_in_hf", parent_values=(True,)
    )
    """Dtype of the weights in that folder."""


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
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    loss: Loss = field(default_factory=Loss)
    liger: Liger = field(default_factory=Liger)
    validation: Validation = field(default_factory=Validation)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
