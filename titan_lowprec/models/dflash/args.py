"""What defines a draft model: sizes, the target's tapped layers, the mask token, the decay."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PUBLISHED_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""The paper's decay of the loss weights, by block size."""


@dataclass(frozen=True, slots=True)
class DFlashArgs:
    """A draft model of Qwen3's layer design; sizes marked "target's" must equal the target's."""

    vocab_size: int
    """Rows of the target's embedding table."""
    model_dim: int
    """The target's hidden size."""
    layers: int
    """Draft layers; 5 in the paper."""
    heads: int
    """Query heads, a multiple of ``kv_heads``."""
    kv_heads: int
    head_dim: int
    """Even; need not be ``model_dim / heads``."""
    hidden_dim: int
    """Width of the SwiGLU."""
    norm_eps: float
    rope_theta: float
    """The target's rotary base."""
    tap_layers: tuple[int, ...]
    """Target layers whose outputs are fused, in the order of ``fc``'s columns; `tap_layers`."""
    target_layers: int
    """Decoder layers of the target."""
    mask_id: int
    """Token that stands for what is to be drafted; `resolve_mask_id`."""
    block_tokens: int
    """Tokens of a block, the anchor included; 16 in the paper."""
    anchor_slots: int
    """Blocks per row and step; 512 in the paper."""
    gamma: float
    """Decay length of the loss weights in tokens; `published_gamma`."""

    def __post_init__(self) -> None:
        who = "DFlashArgs"
        positive = "vocab_size model_dim layers heads kv_heads head_dim hidden_dim anchor_slots"
        for name in positive.split():
            if getattr(self, name) < 1:
                raise ValueError(f"{who}: {name} must be at least 1, got {getattr(self, name)}")
        if self.block_tokens < 2:
            raise ValueError(
                f"{who}: block_tokens must be at least 2 (the anchor and one draft), got "
                f"{self.block_tokens}; the paper has 16"
            )
        if self.heads % self.kv_heads != 0 or self.head_dim % 2 != 0:
            raise ValueError(
                f"{who}: heads must be a multiple of kv_heads and head_dim even, got "
                f"{self.heads}, {self.kv_heads} and {self.head_dim}"
            )
        check_gamma(self.gamma)
        check_taps(self.tap_layers, target_layers=self.target_layers)
        check_mask_id(self.mask_id, vocab_size=self.vocab_size, eos_ids=())

    @property
    def feature_dim(self) -> int:
        """Width of the concatenated taps."""
        return len(self.tap_layers) * self.model_dim


def tap_layers(*, target_layers: int, taps: int) -> tuple[int, ...]:
    """Spread taps over the target's layers: ``round(1 + i (n - 4) / (m - 1))``; one tap: n // 2.

    Layer ``i`` means the output of decoder layer ``i``: Hugging Face's ``hidden_states[i + 1]``.

    Raises:
        ValueError: The rule gives a layer twice, or one that has no tap; see `check_taps`.

    Source:
        arXiv:2602.06036 and its published inference code (ties go to the even layer).
    """
    if taps < 1:
        raise ValueError(f"tap_layers: taps must be at least 1, got {taps}; the paper has 5")
    if taps == 1:
        chosen = (target_layers // 2,)
    else:
        chosen = tuple(round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps))
    check_taps(chosen, target_layers=target_layers)
    return chosen


def check_taps(chosen: Sequence[int], *, target_layers: int) -> None:
    """Refuse no taps, a tap twice, one outside the target, and the last layer."""
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(
            f"tap_layers: taps must be distinct and at least one, got {tuple(chosen)} of "
            f"{target_layers} target layers; ask for fewer taps or name them"
        )
    for layer in chosen:
        if layer == target_layers - 1:
            raise ValueError(
                f"tap_layers: the last layer, {layer}, cannot be tapped: Hugging Face's last "
                "hidden state is after the final norm; name an earlier one"
            )
        if not 0 <= layer < target_layers:
            raise ValueError(
                f"tap_layers: taps must be in [0, {target_layers - 1}), got {layer}; "
                "layer i is the output of decoder layer i, counted from 0"
            )


def published_gamma(*, block_tokens: int) -> float:
    """Return the paper's decay length for a block size, or refuse a size it does not give."""
    if block_tokens not in PUBLISHED_GAMMA:
        raise ValueError(
            f"published_gamma: the paper gives gamma for blocks of {sorted(PUBLISHED_GAMMA)} "
            f"tokens, got {block_tokens}; set gamma explicitly"
        )
    return PUBLISHED_GAMMA[block_tokens]


def check_gamma(gamma: float | None) -> None:
    """Refuse a decay length that is missing, not finite or not positive."""
    if gamma is None or not (math.isfinite(gamma) and gamma > 0):
        raise ValueError(
            f"DFlashArgs: gamma must be finite and > 0, got {gamma}; "
            "published_gamma knows the paper's (7 for blocks of 16)"
        )


def resolve_mask_id(
    *,
    explicit: int | None,
    draft_config: Mapping[str, Any],
    tokenizer_mask_id: int | None,
    tokenizer_size: int,
    vocab_size: int,
    eos_ids: Collection[int],
) -> int:
    """Choose the mask token: explicit, draft config, tokenizer's own, first unused row.

    Args:
        explicit: From the job's configuration, or ``None``.
        draft_config: A published draft's configuration; its ``mask_token_id``, at the top or
            under ``dflash_config``, is used.
        tokenizer_mask_id: The tokenizer's mask token, or ``None``.
        tokenizer_size: One more than the largest id the tokenizer can produce.
        vocab_size: Rows of the embedding table.
        eos_ids: End-of-sequence tokens of the target.

    Raises:
        ValueError: The choice is outside the table or ends sequences (a pad token that equals
            eos, say), or there is no unused row.
    """
    nested = draft_config.get("dflash_config") or {}
    configured = draft_config.get("mask_token_id", nested.get("mask_token_id"))
    for candidate in (explicit, configured, tokenizer_mask_id):
        if candidate is not None:
            check_mask_id(candidate, vocab_size=vocab_size, eos_ids=eos_ids)
            return candidate
    if tokenizer_size >= vocab_size:
        raise ValueError(
            f"resolve_mask_id: no embedding row is unused: the tokenizer has {tokenizer_size} ids "
            f"and the table {vocab_size} rows; name a mask_id that the data never contains"
        )
    check_mask_id(tokenizer_size, vocab_size=vocab_size, eos_ids=eos_ids)
    return tokenizer_size


def check_mask_id(mask_id: int, *, vocab_size: int, eos_ids: Collection[int]) -> None:
    """Refuse a mask token outside the embedding table or one that ends sequences."""
    if not 0 <= mask_id < vocab_size:
        raise ValueError(
            f"mask_id: must be in [0, {vocab_size}), a row of the embedding table, got {mask_id}"
        )
    if mask_id in eos_ids:
        raise ValueError(
            f"mask_id: must not end sequences, got {mask_id}, an eos token (perhaps a pad token "
            "that equals it); name an unused row"
        )
