"""The target's embedding table and head, frozen, with what the target does around them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from titan_lowprec.shapes import Float, Int64, Tensor


@dataclass(frozen=True, slots=True)
class FrozenTables:
    """Embedding and head of the target; no part of the draft, its checkpoint or its optimizer."""

    embed_VE: Float[Tensor, "V E"]
    head_VE: Float[Tensor, "V E"]
    """The embedding table itself where the target ties them."""
    embed_scale: float
    """What the target multiplies embeddings by; 1.0 for most."""
    output_multiplier: float
    """What the target multiplies logits by; 1.0 for most."""
    softcap: float | None
    """The target's cap on final logits, ``softcap * tanh(logits / softcap)``."""

    def __post_init__(self) -> None:
        if self.embed_VE.shape != self.head_VE.shape or self.embed_VE.dtype != self.head_VE.dtype:
            raise ValueError(
                f"FrozenTables: embedding and head must agree, got {self.embed_VE.dtype} "
                f"{tuple(self.embed_VE.shape)} and {self.head_VE.dtype} "
                f"{tuple(self.head_VE.shape)}; pass the target's own"
            )
        if self.embed_VE.requires_grad or self.head_VE.requires_grad:
            raise ValueError(
                "FrozenTables: embedding and head must be frozen, got one that requires a "
                "gradient; detach the target's weights"
            )

    def embed(self, tokens: Int64[Tensor, "*N"]) -> Float[Tensor, "*N E"]:
        """Embed tokens as the target does."""
        return F.embedding(tokens, self.embed_VE) * self.embed_scale

    def logits(self, hidden: Float[Tensor, "*N E"]) -> Float[Tensor, "*N V"]:
        """Return the target's logits of normed hidden states, all of them; for decoding."""
        logits = (hidden * self.output_multiplier) @ self.head_VE.T
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def frozen_tables(
    embed_VE: Float[Tensor, "V E"],
    head_VE: Float[Tensor, "V E"] | None,
    *,
    tied: bool,
    embed_scale: float,
    output_multiplier: float,
    softcap: float | None,
) -> FrozenTables:
    """Detach a target's tables and hold them to what its configuration says about tying.

    Args:
        embed_VE: The embedding table.
        head_VE: The head; ``None`` only for a tied target.
        tied: Whether the target's configuration ties them.
        embed_scale: See `FrozenTables`, as the other options.
        output_multiplier: See `FrozenTables`.
        softcap: See `FrozenTables`.

    Raises:
        ValueError: The head is missing, or a tied target's head has other values than its table
            (a fresh one, say): drafts would be trained, or decoded, against noise.
    """
    if head_VE is None and not tied:
        raise ValueError(
            "frozen_tables: an untied target needs its head, got None; load lm_head.weight"
        )
    if tied and head_VE is not None and not torch.equal(embed_VE, head_VE):
        raise ValueError(
            "frozen_tables: a tied target's head must be its embedding table, got other values; "
            "pass None for the head"
        )
    table = embed_VE.detach()
    head = table if tied or head_VE is None else head_VE.detach()
    return FrozenTables(table, head, embed_scale, output_multiplier, softcap)
