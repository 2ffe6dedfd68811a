"""What ``python -m titan_lowprec.validate`` says about a recipe that trains a draft."""

from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.train_spec import get_train_spec

from titan_lowprec.models.dflash.args import DFlashArgs
from titan_lowprec.models.dflash.model import DraftModel
from titan_lowprec.titan.dflash.args import DraftModelArgs, draft_args, target_args
from titan_lowprec.titan.dflash.choices import attention_on
from titan_lowprec.titan.dflash.qwen3 import PackedQwen3
from titan_lowprec.titan.dflash.vocabulary import vocabulary_of
from titan_lowprec.titan.dflash.weights import path_kind
from titan_lowprec.titan.llama3.model import LowprecLlama
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.specs import AttentionPlan

GIB = 1024**3


def draft_rows(config: MergedJobConfig, *, world_size: int, rows: int) -> list[tuple[str, str]]:
    """Draft, target, blocks and memory.

    Args:
        config: Checked.
        world_size: Processes.
        rows: Of an optimizer step.
    """
    flavors: Any = get_train_spec(config.model.name).model_args
    args: DraftModelArgs = flavors[config.model.flavor]
    draft = draft_args(args, config, vocabulary_of(config))
    section, training = config.dflash, config.training
    with torch.device("meta"):
        parameters = count(DraftModel(draft))
    target = target_parameters(args)
    found = path_kind(section.target_path) or "not there yet"
    slots = rows * draft.anchor_slots
    memory = draft_memory(config, draft, parameters, target, world_size=world_size)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items())
    return [
        ("model", f"dflash {config.model.flavor}"),
        ("draft parameters", f"{parameters:,}, {draft.layers} layers; taps {draft.tap_layers}"),
        (
            "target",
            f"{args.target_model} {args.target_flavor}, {target:,} parameters, "
            f"{section.features} features; {section.target_path} ({found})",
        ),
        (
            "blocks per step",
            f"{slots:,} of {draft.block_tokens} tokens in {rows} rows of {training.seq_len:,}; "
            f"gamma {draft.gamma:g}, mask token {draft.mask_id}, objective {section.objective}",
        ),
        ("memory per GPU", f"about {sum(memory.values()) / GIB:.2f} GiB ({parts})"),
        (
            "draft attention",
            f"{attention_on(config, 'cpu')} on CPU, {attention_on(config, 'cuda')} on GPUs",
        ),
    ]


def count(module: torch.nn.Module) -> int:
    """Parameters of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def target_parameters(args: DraftModelArgs) -> int:
    """Parameters of the target; of one that never runs here, embedding and head."""
    shape = args.target
    if args.target_model == "offline":
        return 2 * shape.vocab_size * shape.dim
    own: Any = target_args(args)
    own.max_seq_len = 1
    with torch.device("meta"):
        llama = args.target_model == "llama3"
        return count(LowprecLlama(own) if llama else PackedQwen3(own, AttentionPlan()))


def draft_memory(
    config: MergedJobConfig, draft: DFlashArgs, parameters: int, target: int, *, world_size: int
) -> dict[str, int]:
    """Bytes on one GPU, an upper bound by intention.

    fp32 parameters, gradients and AdamW's moments, over the shards; the draft gathered in the
    compute type; the target's weights (embedding and head whole where its layers are sharded);
    what autograd keeps of a draft layer, in values of the compute type, for a token of context
    ``11 J D``, of a block ``9 E + 4 F + 11 (H + J) D`` (norms and rotation keep fp32 copies), and
    fp32 q, k and v where attention converts them; taps; logits of a chunk in fp32 with their
    gradient. Left out: the target's own activations, the CUDA context, fragmentation. Measured on
    an H200 for 4 rows of ``dflash_qwen3_8b``: the layers peak at 40.3 GiB, where this says 45.
    """
    width = 2 if TORCH_DTYPE_MAP[config.training.mixed_precision_param].itemsize == 2 else 4
    rows = config.training.local_batch_size
    context, drafted = rows * config.training.seq_len, rows * draft.anchor_slots
    drafted *= draft.block_tokens
    shards = max(1, world_size // config.parallelism.data_parallel_replicate_degree)
    tables = 2 * draft.vocab_size * draft.model_dim
    in_process = config.dflash.features == "online"
    layers = (target - tables) // (shards if config.dflash.shard_target else 1)
    heads, kv = draft.heads * draft.head_dim, draft.kv_heads * draft.head_dim
    block = 9 * draft.model_dim + 4 * draft.hidden_dim + 11 * (heads + kv)
    kept = width * (11 * kv * context + block * drafted)
    if config.dflash.attention.startswith("flex_fp32"):
        kept += 4 * (heads * drafted + 2 * kv * (context + drafted))
    kept *= draft.layers
    if config.activation_checkpoint.mode == "full":
        kept = width * draft.layers * draft.model_dim * drafted + kept // draft.layers
    return {
        "optimizer state": 4 * 4 * parameters // shards,
        "gathered": width * parameters,
        "target": width * (tables + (layers if in_process else 0)),
        "activations": kept + width * draft.feature_dim * context,
        "logits": 8 * config.loss.chunk_rows * draft.vocab_size,
    }
