"""Useful FLOPs of a step of draft training."""

from dataclasses import dataclass

from titan_lowprec.models.dflash.args import DFlashArgs


@dataclass(frozen=True)
class DraftWork:
    """What a step processed on all ranks."""

    tokens: int
    """Context tokens, padding left out."""
    attention_pairs: int
    """Visible (query, key) pairs of one layer of the target."""
    anchors: int
    """Used slots."""
    target_parameters: int
    """Weights of the target's layers that run; 0 where features come from disk."""
    target_attention: int
    """Layers x heads x head dimension of those layers."""


def draft_step_flops(args: DFlashArgs, work: DraftWork) -> int:
    """Count matrix products of target and draft.

    A frozen weight costs two FLOPs a token, the head four (its input has a gradient), ``fc`` four
    (its input has none), a trained weight six. A draft token sees ``attention_pairs / tokens``
    keys of context, the mean of the target's own, and its block. Unused slots, padding, the second
    head pass of D-PACE and of acceptance, and recomputation earn nothing.
    """
    E, D, P = args.model_dim, args.head_dim, args.block_tokens
    drafted = work.anchors * P
    target = 2 * work.target_parameters * work.tokens
    target += 4 * work.target_attention * work.attention_pairs
    on_block = 2 * E * args.heads * D + 3 * E * args.hidden_dim
    on_both = 2 * E * args.kv_heads * D
    layer = 6 * (on_block * drafted + on_both * (work.tokens + drafted))
    keys = work.attention_pairs / max(work.tokens, 1) + P
    layer += round(12 * args.heads * D * drafted * keys)
    return (
        target
        + args.layers * layer
        + 4 * args.feature_dim * E * work.tokens
        + 4 * args.vocab_size * E * drafted
    )
