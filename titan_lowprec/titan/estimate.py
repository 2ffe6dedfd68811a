"""Size of a job before it runs: parameters, tokens, and memory on one GPU."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.protocols.train_spec import get_train_spec

from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.parallelize import resolve_one_process

LOGIT_BYTES = {"logits_fp32": 12, "logits_bf16": 6}
"""Bytes per logit at the peak of the loss: bf16 logits and their gradient, and for fp32 the fp32
copies of both. (Measured for plain PyTorch at 8,192 x 163,840: 11.4 and 5.4.)"""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Parameters of a model that exists on the meta device only."""

    parameters: int
    embedding: int
    """Of the input embedding."""
    largest_block: int
    """Of one transformer layer."""
    ffn_dim: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one GPU."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Sum of the parts, taken to peak together."""
        parts = (self.parameters, self.gradients, self.optimizer)
        return sum(parts) + self.gathered + self.activations + self.logits


def model_size(job_config: MergedJobConfig) -> ModelSize:
    """Build the model on the meta device and count."""
    spec = get_train_spec(job_config.model.name)
    args: Any = copy.deepcopy(spec.model_args[job_config.model.flavor])
    args.max_seq_len = job_config.training.seq_len
    with torch.device("meta"):
        model: Any = spec.model_cls(args)
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.layers.values()]
    return ModelSize(
        parameters=sum(p.numel() for p in model.parameters()),
        embedding=model.tok_embeddings.weight.numel(),
        largest_block=max(blocks),
        ffn_dim=next(iter(model.layers.values())).feed_forward.w1.out_features,
    )


def rows_per_step(job_config: MergedJobConfig, *, world_size: int) -> int:
    """Rows of an optimizer step over all ranks."""
    training, parallelism = job_config.training, job_config.parallelism
    if training.global_batch_size > 0:
        return training.global_batch_size
    return training.local_batch_size * world_size // parallelism.tensor_parallel_degree


def memory_estimate(job_config: MergedJobConfig, *, world_size: int) -> MemoryEstimate:
    """Estimate the peak memory of training on one GPU, an upper bound by intention.

    With ``P`` parameters, ``w`` bytes each (4, or 2 under ``training.dtype = "bfloat16"``),
    ``s`` shards and tensor-parallel degree ``t``:

    * parameters ``w P / (s t)``, gradients the same, AdamW's two moments twice that;
    * gathered by FSDP in ``mixed_precision_param`` (``c`` bytes): two layers and the larger of
      embedding and head, ``c (2 P_layer + P_embedding) / t``; all of ``P`` under
      ``fsdp_reshard_after_forward = "never"`` where FSDP2 gathers;
    * activations of one microbatch, see ``activation_bytes``, divided by ``t``;
    * logits ``12 V`` bytes a token (``logits_fp32``), ``6 V`` (``logits_bf16``), or of
      ``chunk_rows`` rows plus an fp32 gradient of the head, both divided by ``t``
      (``linear_chunked``).

    Left out: the CUDA context, communication buffers, fragmentation, validation, ``torch.compile``.
    """
    size = model_size(job_config)
    training, parallelism = job_config.training, job_config.parallelism
    degree = parallelism.tensor_parallel_degree
    shards = world_size // (parallelism.data_parallel_replicate_degree * degree)
    if parallelism.data_parallel_shard_degree > 0:
        shards = parallelism.data_parallel_shard_degree
    width = 2 if training.dtype == "bfloat16" else 4
    compute_width = 2 if training.mixed_precision_param == "bfloat16" else 4
    parameters = width * size.parameters // (shards * degree)
    gathered = 2 * size.largest_block + size.embedding
    sharded = resolve_one_process(job_config, world_size=world_size) == "fsdp2"
    if sharded and parallelism.fsdp_reshard_after_forward == "never":
        gathered = size.parameters
    return MemoryEstimate(
        parameters=parameters,
        gradients=parameters,
        optimizer=2 * parameters,
        gathered=compute_width * gathered // degree,
        activations=activation_bytes(job_config, size, compute_width) // degree,
        logits=logit_bytes(job_config, size),
    )


def activation_bytes(job_config: MergedJobConfig, size: ModelSize, compute_width: int) -> int:
    """Bytes that autograd keeps of one microbatch, without logits.

    A layer keeps per token, in ``c`` bytes: two norms' inputs and outputs (``4 E``), the
    feed-forward's two projections, their activation and product (``4 F``), and the attention
    output (``H D``); and Q, K, V (``(H + 2 J) D``) in ``c`` bytes, or one byte where the recipe
    stores codes. Checkpointing keeps a layer's input (``E``) instead, plus one whole layer during
    recomputation: ``full`` in all layers, ``selective`` with a number n in every n-th; ``op`` is
    taken as half, ``memory_budget`` as its budget.
    """
    args: Any = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    tokens = job_config.training.local_batch_size * job_config.training.seq_len
    heads = args.n_heads * args.head_dim
    operands = heads + 2 * (args.n_kv_heads or args.n_heads) * args.head_dim
    operand_width = compute_width if job_config.attention.recipe == "bf16" else 1
    layer = compute_width * (4 * args.dim + 4 * size.ffn_dim + heads) + operand_width * operands
    return tokens * (
        kept_layers_bytes(job_config, layer, compute_width * args.dim, args.n_layers)
        + compute_width * args.dim
    )


def kept_layers_bytes(job_config: MergedJobConfig, layer: int, entry: int, layers: int) -> int:
    """Bytes per token over all layers under the job's activation checkpointing."""
    section = job_config.activation_checkpoint
    if section.mode == "none":
        return layers * layer
    if section.mode == "memory_budget":
        return round(layers * layer * section.memory_budget)
    if section.mode == "full":
        return layers * entry + layer
    if section.selective_ac_option == "op":
        return layers * (layer // 2) + layer
    checkpointed = layers // int(section.selective_ac_option)
    return (layers - checkpointed) * layer + checkpointed * entry + layer


def logit_bytes(job_config: MergedJobConfig, size: ModelSize) -> int:
    """Bytes of logits and their gradients at the peak of the loss."""
    args: Any = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    loss, training = job_config.loss, job_config.training
    if loss.impl == "linear_chunked":
        whole = loss.chunk_rows * args.vocab_size * LOGIT_BYTES["logits_fp32"] + 4 * size.embedding
        return whole // job_config.parallelism.tensor_parallel_degree
    tokens = training.local_batch_size * training.seq_len
    return tokens * args.vocab_size * LOGIT_BYTES[loss.impl]
