"""Our sections of TorchTitan's job file.

TorchTitan merges these dataclasses into its own by field type, so annotations here are real types,
never strings, and a field that stock TorchTitan has as well replaces the stock default.
Checks live in ``check_config``: TorchTitan does not check the types of TOML values.
"""

from dataclasses import dataclass, field
from typing import Literal

from titan_lowprec.titan.dflash.section import DFlash


@dataclass
class Model:
    hf_assets_path: str = "."
    """Folder of Hugging Face weights (``*.safetensors``) for ``checkpoint.initial_load_in_hf``.
    The tokenizer is ``data.tokenizer``."""

    tie_embeddings: bool = False
    """Share the embedding and the output head. Refused when true: FSDP2 of torch >= 2.12 cannot
    shard a parameter that two modules own. Tied Hugging Face checkpoints load all the same; the
    head starts as a copy of the embedding."""


@dataclass
class Attention:
    """``[attention]``: the attention recipe and its options (ops/attention/README.md)."""

    recipe: Literal["fp32", "bf16", "mxfp8", "nvfp4_mixed", "nvfp4_full"] = "mxfp8"
    """Number formats of the attention operands, forward and backward. ``fp32`` rounds nothing and
    is the exact attention of an evaluation."""

    impl: Literal["auto", "reference", "triton"] = "auto"
    """``auto`` is resolved once at start, and logged: ``triton`` where its kernels take the recipe
    (sm90), ``reference`` (PyTorch) elsewhere. A named choice runs or raises."""

    scales: Literal["token_block", "token"] = "token_block"
    """One exponent per 32 tokens of a document and head, or one per token (strictly causal)."""

    fold: Literal["block_scaled", "hopper"] = "hopper"
    """Where exponents meet the products: inside a block-scaled MMA, or outside a plain FP8 one."""

    gradient_groups: Literal["tile", "line"] = "line"
    """Elements of P and dS that share an exponent: 32x32 tiles, or lines of one row by one tile
    (``fold = "hopper"`` only, what the kernels do)."""

    tile_q: int = 64
    """Query rows per tile of the online softmax. Multiple of 32, at least 32."""

    tile_k: int = 64
    """Key rows per tile of the online softmax. Multiple of 32, at least 32."""

    weight_exponent: int = 8
    """c: softmax weights are stored as e4m3(p * 2^c). ``c + max_lag <= log2(448)``, so 0 to 8."""

    max_lag: int = 0
    """tau, log2 units by which the running maximum may lag the true one. 0 is exact (training)."""

    row_sum: Literal["unrounded", "rounded"] = "unrounded"
    """Sum the softmax weights before or after their e4m3 cast (``rounded`` is for study)."""

    dv_exponent: Literal["tile", "fixed"] = "tile"
    """Exponent of P in dV: from the maximum of its 32x32 tile, or the fixed 2^8 of the paper."""

    dq_accum: Literal["fp32", "fp16_boost"] = "fp32"
    """Accumulator of dQ; ``fp16_boost`` is the paper's scaled fp16 (reference only)."""

    delta_gradient: Literal["as_in_dp", "unquantised_fault"] = "as_in_dp"
    """G in D = rowsum(G * O). ``unquantised_fault`` is a fault, for the ablation: D from G as it
    came and dP from its codes, so that rows of dS no longer sum to zero (reference only)."""

    rotate: bool = True
    """Rotate Q and K by a Hadamard matrix before quantisation. Needs a power-of-two head dim."""

    output_residual: bool = False
    """Save the low part of O as well and use it in D = rowsum(G * O): one bf16 O more of memory."""

    deterministic: bool = True
    """Bit-reproducible gradients (no atomics in dQ)."""

    high_precision_layers: list[str] = field(default_factory=list)
    """Layer numbers whose attention stays in recipe ``bf16``, for example ``["0", "15"]``."""


@dataclass
class Loss:
    """``[loss]``: the cross-entropy over the vocabulary."""

    impl: Literal["logits_fp32", "logits_bf16", "linear_chunked"] = "logits_fp32"
    """fp32 reductions over logits; the bf16 log-softmax of before (ablation); or head and loss in
    one chunked op that never holds all logits, nor under tensor parallelism the whole head."""

    chunk_rows: int = 1024
    """Rows (tokens) per chunk of ``linear_chunked``. Multiple of 128; 1024 to 2048 is fastest."""

    z_loss: float = 0.0
    """Weight of the squared log-sum-exp added per token. At least 0."""

    softcap: float = 0.0
    """Logits become ``softcap * tanh(logits / softcap)``; 0 is off. At least 0."""


@dataclass
class Data:
    """``[data]``: documents, tokenizer and packing. ``training.dataset`` is not used."""

    source: Literal["local", "hf"] = "local"
    """Files on disk, or a Hugging Face dataset."""

    paths: list[str] = field(default_factory=lambda: ["bundled:train"])
    """``local``: jsonl, parquet or text files, globs allowed; ``bundled:train`` is the text that
    ships with the package."""

    validation_paths: list[str] = field(default_factory=lambda: ["bundled:validation"])
    """Files of the fixed validation set, same kinds as ``paths``."""

    hf_name: str = ""
    """``hf``: dataset name or local dataset folder, for example ``HuggingFaceFW/fineweb-edu``."""

    hf_config: str = ""
    """``hf``: configuration (subset) name, for example ``sample-350BT``."""

    hf_split: str = "train"
    """``hf``: split to train on."""

    hf_revision: str = ""
    """``hf``: revision on the Hub; empty for the newest."""

    streaming: bool = False
    """Tokenise while training instead of tokenising everything into the cache first."""

    window_documents: int = 8192
    """``streaming``: documents that are shuffled and packed together. At least 1."""

    text_column: str = "text"
    """Column (parquet, Hugging Face) or key (jsonl) that holds a document's text."""

    tokenizer: str = "bundled:tokenizer"
    """Folder with ``tokenizer.json``; as written, the 2,048-entry tokenizer of the package."""

    packer: Literal["concat", "best_fit"] = "best_fit"
    """How documents fill rows of ``training.seq_len`` tokens."""

    long_document: Literal["split", "truncate", "drop"] = "split"
    """What happens to a document longer than a row."""

    max_documents: int = 128
    """Documents a row may hold: the fixed capacity of ``cu_seqlens``. At least 1."""

    min_document_tokens: int = 2
    """Documents with fewer tokens are left out (and counted). At least 1."""

    add_bos: bool = True
    """Begin every document with the tokenizer's BOS token."""

    add_eos: bool = True
    """End every document with the tokenizer's EOS token."""

    seed: int = 0
    """Seed of the document order; each epoch has its own order."""

    repeat: bool = True
    """Start another epoch when the data ends; otherwise the run stops with an error status."""

    cache_dir: str = ""
    """Folder of the token cache; empty means ``{job.dump_folder}/data_cache``."""


@dataclass
class Training:
    max_skipped_steps: int = 10
    """Optimizer steps with non-finite loss or gradients are skipped and counted; this many in a row
    end the run. At least 1."""

    clip_where: Literal["gradients", "optimizer"] = "gradients"
    """Where gradients are scaled down to ``max_norm``: in ``.grad``, or as a fused optimizer reads
    them, which saves a pass over them. Clipped steps differ by roundings of fp32."""


@dataclass
class Parallelism:
    one_process: Literal["auto", "direct", "fsdp2"] = "auto"
    """How one process computes in ``mixed_precision_param`` (llama3_lowprec): ``direct`` casts
    parameters and takes gradients without copies (``titan/one_process.py``), ``fsdp2`` gathers and
    reduces with itself, with the same bits. ``auto`` is ``direct`` unless parameters are offloaded
    to the CPU. Several processes use FSDP2 whatever this says, and not with ``direct``."""


@dataclass
class ActivationCheckpoint:
    save_ops: list[str] = field(
        default_factory=lambda: ["attention", "half_linears", "amax", "collectives"]
    )
    """With mode ``selective`` and ``selective_ac_option = "op"``: results that blocks keep; all
    else is recomputed. ``attention`` is output, LSE, codes and scales, so that no part of it runs
    twice (``attention_if_smaller``: only where that takes no more bytes than bf16 Q, K and V);
    ``linears`` or ``half_linears`` (every second); ``amax``; ``collectives``; or an op, for
    example ``aten.silu.default`` (``titan/activation.py``)."""


@dataclass
class Graph:
    """``[graph]``: forward and backward of a microbatch as one CUDA graph (``titan/graph.py``)."""

    enable: bool = False
    """Capture after two eager optimizer steps, then replay. What cannot be captured is refused at
    start (``titan/graph_rules.py``)."""

    max_documents: int = 0
    """Documents of a row that the graph has room for, at most ``data.max_documents``; 0 is that.
    Room that no row uses costs idle thread blocks in every attention kernel."""

    over_capacity: Literal["eager", "error"] = "eager"
    """A microbatch with more documents in a row runs eagerly and is counted
    (``graph_over_capacity``), or ends the run. It is never cut."""


@dataclass
class Checkpoint:
    allow_changed_config: bool = False
    """Resume although the recipe, scales, data or model differ from the checkpoint's."""


@dataclass
class Metrics:
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Mode of wandb, if ``metrics.enable_wandb``: ``auto`` is online with an API key, else
    offline."""

    run_name: str = ""
    """Name and resumable id of the run in wandb; empty takes the dump folder's name."""

    health_every: int = 0
    """Steps between measurements of every attention layer on a slice of the batch, written as
    ``quantisation/*`` and ``causality/*`` (``titan/health.py``); its time counts for the step. 0 is
    never. Changes no bit of the training. ``llama_tiny_mxfp8``: 0.7 s a measurement on a core."""


@dataclass
class JobConfig:
    model: Model = field(default_factory=Model)
    attention: Attention = field(default_factory=Attention)
    loss: Loss = field(default_factory=Loss)
    data: Data = field(default_factory=Data)
    dflash: DFlash = field(default_factory=DFlash)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    graph: Graph = field(default_factory=Graph)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
